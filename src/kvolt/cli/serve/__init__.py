"""`kvolt serve`."""
