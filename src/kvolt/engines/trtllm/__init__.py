"""TensorRT-LLM as an engine of kvolt: its LLM API in the worker's process. Built to what its source says, never run."""
