"""Incremental detokenization."""
