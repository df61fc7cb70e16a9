"""kvolt serves large language models across many machines."""

from kvolt.version import __version__

__all__ = ["__version__"]
