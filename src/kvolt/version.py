"""Version of kvolt. A module of its own, so that lower layers need not import the package's public names."""

__version__ = "0.7.0"
