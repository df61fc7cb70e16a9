"""For all tests."""

import os

# Two test processes with a pool of threads each, on two cores, wait for each other most of the time. Read by
# torch when it is first imported, and by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from hypothesis import settings

# Tests assert behaviour, not wall time: a busy machine must not fail an example.
settings.register_profile("kvolt", deadline=None)
settings.load_profile("kvolt")

_HERE = Path(__file__).parent
_MEASURED = ("unit", "compat")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Coverage is that of unit tests and of real clients. It makes Python three times as slow, and whole clusters run
    for minutes through what those have measured already."""
    for item in items:
        if item.path.relative_to(_HERE).parts[0] not in _MEASURED:
            item.add_marker("no_cover")
