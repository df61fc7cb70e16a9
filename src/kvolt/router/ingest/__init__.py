"""KV events into the prefix index: ordering, loss, replay, snapshots."""
