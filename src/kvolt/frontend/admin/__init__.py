"""Admin operations of a frontend: KV caches, LoRA adapters, explanations, trace recording."""
