"""For all tests."""

import gc
import os
import signal

import pytest
from hypothesis import settings
from tests.order import shuffled

# A background job of a shell has SIGINT ignored, and so has every process it starts: tests send SIGINT to both.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two test processes with a pool of threads each, on two cores, wait for each other most of the time. Read by
# torch when it is first imported, and by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests assert behaviour, not wall time: a busy machine must not fail an example.
settings.register_profile("kvolt", deadline=None, max_examples=50)
settings.register_profile("deep", deadline=None, max_examples=500)
settings.load_profile("kvolt")

# Collecting tests makes millions of objects and no garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests from garbage collection: leak checks collect hundreds of times."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed",
        type=int,
        default=None,
        metavar="N",
        help="run modules, and the tests of each module, in a random order that follows from this seed",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed: int | None = config.getoption("--order-seed")
    if seed is not None:
        items[:] = shuffled(items, [str(item.path) for item in items], seed)
