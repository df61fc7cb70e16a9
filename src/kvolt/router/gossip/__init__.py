"""Gossip between router replicas that share workers: the load that each has reserved."""
