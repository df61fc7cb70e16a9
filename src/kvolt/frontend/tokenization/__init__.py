"""Text to token ids, with limits on size and time."""
