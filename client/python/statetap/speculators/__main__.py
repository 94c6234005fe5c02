"""`python -m statetap.speculators …`: the program `speculators` with the backend `statetap` known to it."""
import statetap.speculators  # noqa: F401  before speculators reads its options

if __name__ == "__main__":  # the loader's processes import this file
    from speculators.cli import app

    app()
