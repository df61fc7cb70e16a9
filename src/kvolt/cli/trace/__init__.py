"""`kvolt trace`."""
