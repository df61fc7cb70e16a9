"""Object tier: blocks in an object store that many workers share."""
