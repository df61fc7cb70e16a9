"""Request and deadlines as sent to a worker, after a routing decision. Pure."""

from __future__ import annotations

import msgspec

from kvolt.core.request import Request
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.call import Deadlines

_MARGIN = 3.0
"""Multiple of the predicted TTFT that a first token may take: predictions err, and other requests may go first."""


def with_decision(request: Request, decision: Decision) -> Request:
    """Add the decision's KV sources and DP rank."""
    if decision.kv_sources:
        request = msgspec.structs.replace(request, kv_sources=decision.kv_sources)
    if decision.dp_rank is not None:
        routing = msgspec.structs.replace(request.routing, pinned_dp_rank=decision.dp_rank)
        request = msgspec.structs.replace(request, routing=routing)
    return request


def deadlines_for(limits: Deadlines, *decisions: Decision | None) -> Deadlines:
    """Deadlines of a call whose first token waits for all of these decisions: `first_s` grows with the predicted TTFT,
    `total_s` stays."""
    predicted_ms = sum(each.predicted_ms or 0.0 for each in decisions if each is not None)
    first_s = _MARGIN * predicted_ms / 1e3
    return limits if first_s <= limits.first_s else msgspec.structs.replace(limits, first_s=first_s)
