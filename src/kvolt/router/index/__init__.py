"""Prefix index: which worker holds which blocks, in which tier."""
