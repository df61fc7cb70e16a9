"""The Python API: `LLM`, `AsyncLLM`, `Client`. Import them from `kvolt`."""
