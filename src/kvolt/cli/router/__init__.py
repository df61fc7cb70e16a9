"""`kvolt router`."""
