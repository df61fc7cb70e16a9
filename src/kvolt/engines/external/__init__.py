"""Base of adapters for external engines: life cycle, requests, outputs, KV events and LoRA."""
