"""Discovery: a key-value store with leases; the `mem`, `file` and `join` implementations."""
