"""Blocks in GPU memory: copies, checksums, CUDA IPC. Imported only if a GPU is used."""
