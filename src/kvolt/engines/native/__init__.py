"""The native engine: a compact PyTorch engine whose KV blocks can travel. torch is imported here only."""
