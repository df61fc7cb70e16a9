"""`kvolt bench`."""
