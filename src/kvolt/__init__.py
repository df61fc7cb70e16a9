"""kvolt serves large language models across many machines."""

__version__ = "0.7.0"
