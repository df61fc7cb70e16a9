"""Plugins that vLLM loads in its own processes: KV connectors, and patches of its workers."""
