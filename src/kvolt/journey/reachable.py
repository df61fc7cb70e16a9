"""Routing while workers are unreachable: a request waits for them instead of failing.

It waits only if no other worker can take it, and at most for the stall grace period. A partial answer, which may be
the prefill worker's tokens only, also waits for a replacement of the last worker that was lost. The caller enforces the
request's deadline.
"""

from __future__ import annotations

import asyncio

from kvolt.core.errors import KvoltError, Unavailable, with_message
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.port import Decision, Router
from kvolt.runtime.endpoint.client import EndpointClient

_TRANSIENT_REASONS = frozenset(
    ("none_reachable", "no_instances", "none_left", "none_fits", "none_allowed", "no_adapter", "pin")
)
"""Reasons of Unavailable that may end when an instance comes back."""


async def route_when_reachable(
    router: Router,
    client: EndpointClient,
    request: Request,
    excluded: frozenset[InstanceId],
    unreachable: frozenset[InstanceId] = frozenset(),
) -> Decision:
    """As `Router.route`, but raises Unavailable only once no worker that could take the request is expected back.

    Excluded workers that were unreachable become candidates when they are back. `unreachable`: excluded for that reason
    alone; they may be back already, or answer on a connection other than the lost one.
    """
    loop = asyncio.get_running_loop()
    started_at: float | None = None
    while True:
        try:
            return await router.route(request, excluded)
        except Unavailable as error:
            recovering = _allowed_by(request, client.recovering())
            back = (excluded & unreachable) - recovering
            if back and error.fields.get("reason") in _TRANSIENT_REASONS:
                excluded -= back
                continue
            started_at = loop.time() if started_at is None else started_at
            left_s = started_at + client.stall_grace_s - loop.time()
            should_wait = recovering or (request.has_started and client.awaits_replacement)
            if not should_wait or left_s <= 0 or error.fields.get("reason") not in _TRANSIENT_REASONS:
                raise _with_wait(error, len(recovering), loop.time() - started_at) from error
        await client.wait_change(left_s)
        excluded -= recovering - client.recovering()


def _allowed_by(request: Request, recovering: frozenset[InstanceId]) -> frozenset[InstanceId]:
    """Those that the request's pins and `allowed` permit."""
    hints = request.routing
    for permitted in (hints.pins.values(), hints.allowed):
        if permitted:
            recovering &= frozenset(permitted)
    return recovering


def _with_wait(error: Unavailable, num_recovering: int, waited_s: float) -> KvoltError:
    if not waited_s:
        return error
    status = f"{num_recovering} of them still being dialed" if num_recovering else "none of them came back"
    return with_message(
        error, f"{error.message}; waited {waited_s:.0f} s, {status}: check that the workers' processes run"
    )
