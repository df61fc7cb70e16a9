"""Blocks in GPU memory: copies, checksums, CUDA IPC. Imported only where a GPU is used."""
