"""One request from admission to its end."""
