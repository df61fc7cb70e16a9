"""kvolt's plug-ins to vLLM, loaded by vLLM in its own processes: connectors for KV, and mends of its workers."""
