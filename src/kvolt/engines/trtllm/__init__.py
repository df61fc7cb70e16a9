"""Adapter for TensorRT-LLM's LLM API, in the worker's process. Written against its source, never run with it."""
