"""`kvolt twin`."""
