"""The native engine: a compact PyTorch engine whose KV blocks can travel."""
