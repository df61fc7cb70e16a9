"""Routing while workers are out of reach: a request waits for them instead of failing.

Waits only where no other worker can take the request, for no longer than the grace of a stall. A request whose client
reads an answer already waits as well for a replacement of the last worker, which was lost. That each request ends
by its own deadline is the journey's to see to.
"""

from __future__ import annotations

import asyncio

from kvolt.core.errors import KvoltError, Unavailable, reworded
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.port import Decision, Router
from kvolt.runtime.endpoint.client import EndpointClient

_OUT_OF_REACH = frozenset(
    ("none_reachable", "no_instances", "none_left", "none_fits", "none_allowed", "no_adapter", "pin")
)
"""Reasons of Unavailable that may end when an instance comes back."""


async def route_when_reachable(
    router: Router,
    client: EndpointClient,
    request: Request,
    excluded: frozenset[InstanceId],
    out_of_reach: frozenset[InstanceId] = frozenset(),
) -> Decision:
    """As `Router.route`, but Unavailable only once no instance that could take the request is awaited any more.

    An excluded instance that could not be reached may be asked again when it is back. `out_of_reach` are those which
    were excluded for that alone: they may be back already, or answer on another connection than the one that was lost.
    """
    loop = asyncio.get_running_loop()
    started_at: float | None = None
    while True:
        try:
            return await router.route(request, excluded)
        except Unavailable as error:
            awaited = _fitting(request, client.awaited())
            back = (excluded & out_of_reach) - awaited
            if back and error.fields.get("reason") in _OUT_OF_REACH:
                excluded -= back
                continue
            started_at = loop.time() if started_at is None else started_at
            left_s = started_at + client.stall_grace_s - loop.time()
            is_awaited = awaited or (request.is_resumed and client.awaits_replacement)
            if not is_awaited or left_s <= 0 or error.fields.get("reason") not in _OUT_OF_REACH:
                raise _explained(error, len(awaited), loop.time() - started_at) from error
        await client.wait_change(left_s)
        excluded -= awaited - client.awaited()


def _fitting(request: Request, awaited: frozenset[InstanceId]) -> frozenset[InstanceId]:
    """Those that the caller's choice of workers, if there is one, includes."""
    hints = request.routing
    for chosen in (hints.pins.values(), hints.allowed):
        if chosen:
            awaited &= frozenset(chosen)
    return awaited


def _explained(error: Unavailable, num_awaited: int, waited_s: float) -> KvoltError:
    if not waited_s:
        return error
    silent = f"{num_awaited} of them still being dialed" if num_awaited else "none of them came back"
    return reworded(
        error, f"{error.message}; waited {waited_s:.0f} s, {silent}: check that the workers' processes run"
    )
