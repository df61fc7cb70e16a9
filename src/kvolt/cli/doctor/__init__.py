"""`kvolt doctor`."""
