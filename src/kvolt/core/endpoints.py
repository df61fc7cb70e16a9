"""Names of endpoints, components and event topics, shared by servers and clients."""

from __future__ import annotations

import hashlib
import re

from kvolt.core.ids import CardHash
from kvolt.core.request import Role

GENERATE = "generate"
"""Requests in, deltas out."""
CARD = "card"
"""Returns the ModelCard of a hash."""
CONTROL = "control"
"""Operator commands to one worker. Not registered: it shares the address of `generate`, and is served while the
worker is cordoned."""
KV = "kv"
"""Requests between workers: reads and offers of KV blocks. Not registered, like `control`."""
KV_POOL = "kv-pool"
"""Component of the shared KV pools. A pool registers its `control` endpoint, where routers query its contents."""
LOAD_TOPIC = "load"
"""Event plane topic of load reports."""
KV_TOPIC = "kv"
"""Event plane topic of KV events: each payload is a KvEventBatch."""
ROUTER_LOAD_TOPIC = "router-load"
"""Event plane topic of the load exchange between routers: each payload is a LoadVector."""


def component_name(model: str, role: Role, card: CardHash) -> str:
    """Component name of interchangeable workers: same model, role and card.

    A changed card (new template, other block size) gives another component, so a rollout never mixes the two.
    """
    slug = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-").lower()[:32] or "model"
    digest = hashlib.blake2b(f"{len(model)}:{model}/{role}/{card}".encode(), digest_size=5).hexdigest()
    return f"{slug}-{role}-{digest}"
