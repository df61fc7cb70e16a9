"""A request as its worker gets it: with what the router has decided besides the worker. Pure."""

from __future__ import annotations

import msgspec

from kvolt.core.request import Request
from kvolt.router.port import Decision


def as_decided(request: Request, decision: Decision) -> Request:
    """Where else its blocks lie, and which of the worker's ranks is to compute it."""
    if decision.kv_sources:
        request = msgspec.structs.replace(request, kv_sources=decision.kv_sources)
    if decision.dp_rank is not None:
        routing = msgspec.structs.replace(request.routing, pinned_dp_rank=decision.dp_rank)
        request = msgspec.structs.replace(request, routing=routing)
    return request
