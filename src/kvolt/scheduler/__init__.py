"""Continuous batching: admission, chunked prefill, preemption, and the time of a step. Pure: no torch, no clock."""
