"""Continuous batching: admission, chunked prefill, preemption, step time limits. Pure: no torch, no clock."""
