"""`kvolt cache`."""
