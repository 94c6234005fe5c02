"""Files for trainers. `python -m statetap.export export --help`."""
