"""The commands of `labcore` that belong to no part of their own. The front is `labcore/cli/main.py`."""
