"""The names under which workers are found: one rule for those who serve and those who call."""

from __future__ import annotations

import hashlib
import re

from kvolt.core.ids import CardHash
from kvolt.core.request import Role

GENERATE = "generate"
"""Requests in, deltas out."""
CARD = "card"
"""The ModelCard by its hash."""
CONTROL = "control"
"""What an operator may ask of one worker (`worker_control`). Not registered: it is found at the address of
`generate`, and answers while the worker is cordoned."""
KV = "kv"
"""What workers ask each other for (`kv_neighbours`). Not registered, as `control`."""
KV_POOL = "kv-pool"
"""The component of all pools that workers of a host share. Of a pool it is `control` that is registered: routers ask
there what it has."""
LOAD_TOPIC = "load"
"""Event plane topic of load reports."""
KV_TOPIC = "kv"
"""Event plane topic of KV events: each payload is a KvEventBatch."""
ROUTER_LOAD_TOPIC = "router-load"
"""Event plane topic of what routers tell each other: each payload is a LoadVector (`router.gossip`)."""


def component_name(model: str, role: Role, card: CardHash) -> str:
    """The component of all workers that are interchangeable: same model, role and card.

    A model that comes back with another card (a new template, another block size) is another component,
    so a rollout never mixes the two.
    """
    slug = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-").lower()[:32] or "model"
    digest = hashlib.blake2b(f"{len(model)}:{model}/{role}/{card}".encode(), digest_size=5).hexdigest()
    return f"{slug}-{role}-{digest}"
