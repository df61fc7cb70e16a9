"""Disk tier: blocks in files, a journal, and 8-bit compression."""
