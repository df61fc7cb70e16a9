"""Names of endpoints, components and event topics, shared by servers and clients, and the withdrawal of a request."""

from __future__ import annotations

import hashlib
import re

import msgspec

from kvolt.core.errors import KvoltError, Unavailable
from kvolt.core.ids import CardHash, RequestId
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
ATTACHED_DETAILS = "attached"
"""Section of a frontend's status with the state of each attached server."""
QUEUE_DETAILS = "router_queue"
"""Section of a frontend's or router process's status with the requests and tokens that wait in its routers."""

_WITHDRAWN = "withdrawn"


def component_name(model: str, role: Role, card: CardHash) -> str:
    """Component name of interchangeable workers: same model, role and card.

    A changed card (new template, other block size) gives another component, so a rollout never mixes the two.
    """
    slug = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-").lower()[:32] or "model"
    digest = hashlib.blake2b(f"{len(model)}:{model}/{role}/{card}".encode(), digest_size=5).hexdigest()
    return f"{slug}-{role}-{digest}"


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Control request: withdraw a dispatched request that has not started.

    Its stream ends with Unavailable and reason `withdrawn`. The caller relies on that error, which arrives even if the
    response to Withdraw is lost. Withdrawing a prefilled prompt that no decode worker will fetch releases its blocks.
    """

    request_id: RequestId


class WithdrawResult(msgspec.Struct, frozen=True, tag="withdrawn"):
    """`was_withdrawn`: the request had not started and will not be computed here. For a prefilled prompt: its blocks
    were still held and are released."""

    was_withdrawn: bool


def withdrawn_error() -> Unavailable:
    """Error that ends the stream of a withdrawn request."""
    return Unavailable("the request was withdrawn before it started", reason=_WITHDRAWN, gpu_work="none")


def was_withdrawn(error: KvoltError | None) -> bool:
    return isinstance(error, Unavailable) and error.fields.get("reason") == _WITHDRAWN
