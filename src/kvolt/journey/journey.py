"""A request's life after preprocessing: route it, stream it.

Knows neither HTTP nor text. It is the one place that will learn about retries, handoffs and
migration; today it routes once.
"""

from __future__ import annotations

import msgspec

from kvolt.core.delta import Delta
from kvolt.core.request import Request
from kvolt.router.port import Router
from kvolt.runtime.call import Deadlines, ResponseStream
from kvolt.runtime.client import EndpointClient

_decode_delta = msgspec.msgpack.Decoder(Delta).decode


class Journey:
    """Sends requests for one model on their way."""

    def __init__(self, router: Router, client: EndpointClient) -> None:
        self._router = router
        self._client = client

    async def begin(self, request: Request, deadlines: Deadlines) -> ResponseStream:
        """The deltas of an answer; leaving the stream cancels the request up to the engine."""
        decision = await self._router.route(request)
        if decision.kv_sources:
            request = msgspec.structs.replace(request, kv_sources=decision.kv_sources)
        return await self._client.stream(
            request, instance=decision.instance, deadlines=deadlines, decode=_decode_delta
        )
