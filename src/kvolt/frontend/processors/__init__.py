"""Who renders prompts and reads answers, by name: kvolt's own from a model's card, or somebody else's code."""
