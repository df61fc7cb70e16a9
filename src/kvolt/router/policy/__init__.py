"""Routing policies: the cost of a request on each worker, the models and loads that it is computed from."""
