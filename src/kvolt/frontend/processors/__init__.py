"""Pre- and postprocessors by name: kvolt's own, based on the model card, vLLM's, and plugins."""
