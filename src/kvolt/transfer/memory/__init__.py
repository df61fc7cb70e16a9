"""Memory that blocks are moved from and to: slabs, layouts, checksums."""
