"""The request plane: frames, sessions and streams, and the connections that carry them."""
