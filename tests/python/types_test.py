"""mypy --strict holds for the installed package. Run by ctest as package_test.py is; skipped where mypy is not there."""
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

MISSING = [name for name in ("mypy", "grpc-stubs", "google-stubs") if not any(Path(p, name).exists() for p in sys.path)]
if MISSING:
    print(f"{sys.executable} has no {', '.join(MISSING)} (pip install mypy types-grpcio types-protobuf): types are not tested")
    sys.exit(77)

# Without torch nothing is known of its classes, and nothing can be said of the modules that are made of them.
NO_TORCH = """
[[tool.mypy.overrides]]
module = ["torch.*"]
ignore_missing_imports = true

[[tool.mypy.overrides]]
module = ["statetap.accept", "statetap.collate", "statetap.drafter", "statetap.features", "statetap.speculators.*"]
ignore_errors = true
"""


class TypesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="statetap-types-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        config = (Path(os.environ["STATETAP_ROOT"]) / "client/python/pyproject.toml").read_text()
        (Path(cls.folder) / "pyproject.toml").write_text(config + (NO_TORCH if importlib.util.find_spec("torch") is None else ""))

    def mypy(self, *arguments):
        environment = {**os.environ, "MYPYPATH": os.environ["PYTHONPATH"]}
        return subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", "cache", *arguments], cwd=self.folder, env=environment, capture_output=True, text=True)

    def test_the_package_is_typed(self):
        checked = self.mypy("-p", "statetap")
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_a_wrong_call_is_found(self):
        wrong = self.mypy("-c", "import statetap\nstatetap.connect(7070)\nstatetap.ShardDataset('a')[0].ids\n")
        self.assertEqual(wrong.returncode, 1, wrong.stdout + wrong.stderr)
        self.assertRegex(wrong.stdout, r'"connect" has incompatible type "int"(.|\n)*"Sample" has no attribute "ids"')


if __name__ == "__main__":
    unittest.main()
