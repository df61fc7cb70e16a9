"""Shared pool: one host tier for all workers of a host, in a separate process."""
