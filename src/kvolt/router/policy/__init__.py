"""Routing policies: the cost of a request on each worker, and what the costs are computed from."""
