"""Chat templates: rendering with limits on size and time."""
