"""KV events into the prefix index: order, loss, replay, snapshots, digests."""
