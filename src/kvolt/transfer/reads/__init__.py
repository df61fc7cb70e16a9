"""One read of a peer's blocks: request, messages, steps in the progress thread, choice and self-test of its path."""
