"""Benchmarks of the native engine."""
