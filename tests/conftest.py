"""For all tests."""

from hypothesis import settings

# Tests assert behaviour, not wall time: a busy machine must not fail an example.
settings.register_profile("kvolt", deadline=None)
settings.load_profile("kvolt")
