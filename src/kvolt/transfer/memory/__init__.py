"""Block memory: slabs, layouts across TP ranks, checksums."""
