"""The process that runs SGLang for a worker, and its messages."""
