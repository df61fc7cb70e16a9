"""Peer tier: blocks in the tiers of other workers, as a lower tier, and serving blocks to them."""
