"""The native engine: a compact PyTorch engine with transferable KV blocks."""
