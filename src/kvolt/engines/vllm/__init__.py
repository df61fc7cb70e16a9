"""Adapter for vLLM: its AsyncLLM runs in the worker's process, its engine core in a process of its own."""
