"""Tokenization with limits on size and time."""
