"""`kvolt worker`."""
