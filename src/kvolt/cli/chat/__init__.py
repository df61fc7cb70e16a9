"""`kvolt chat`."""
