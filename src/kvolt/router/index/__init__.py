"""Prefix index: the blocks that each worker holds, by tier."""
