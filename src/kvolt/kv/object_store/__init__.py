"""Object tier: blocks in an object store shared by many workers."""
