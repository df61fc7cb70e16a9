"""For all tests."""

import os

# Two test processes with a pool of threads each, on two cores, wait for each other most of the time. Read by
# torch when it is first imported, and by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# Tests assert behaviour, not wall time: a busy machine must not fail an example.
settings.register_profile("kvolt", deadline=None)
settings.load_profile("kvolt")
