"""`kvolt frontend`."""
