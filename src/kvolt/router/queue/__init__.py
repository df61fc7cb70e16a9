"""Queue of requests while all workers are saturated."""
