"""vLLM as an engine of kvolt: its AsyncLLM in the worker's process, its engine core in one of its own."""
