"""Load and traces: what asks a server as people would, and what such asking looked like."""
