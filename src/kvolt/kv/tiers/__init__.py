"""Tiers below the device: blocks of KV kept in memory of the host, on a disk or in an object store."""
