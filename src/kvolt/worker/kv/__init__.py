"""KV of a worker: handoffs to decode workers, tiers, events, and what its peers hold."""
