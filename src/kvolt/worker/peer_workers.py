"""PeerWorkers: discovery of, and requests to, workers of the same kind that share KV.

Over the request plane, at an endpoint that is not registered: it is found at the address of `generate`, and answers
while the worker is cordoned. Bytes go by the transfer agents.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from kvolt.core.endpoints import KV
from kvolt.core.errors import ProtocolError
from kvolt.core.ids import InstanceId
from kvolt.kv.shared_pool.wire import Bring, Brought
from kvolt.kv.tiers.peer_server import PeerGiving
from kvolt.kv.tiers.peer_tier import PeerTier
from kvolt.runtime.endpoint.address import EndpointAddress
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient, open_stream
from kvolt.runtime.endpoint.server import decoder
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.runtime import Runtime

_DEADLINES = Deadlines(connect_s=1.0, first_s=5.0, between_s=20.0, total_s=20.0)

_decode_brought = msgspec.msgpack.Decoder(Brought).decode


class PeerWorkers:
    """See the module. `start` before the worker registers, `begin` once it has, `close` before its tiers."""

    def __init__(
        self, runtime: Runtime, generate: EndpointAddress, peers: PeerTier, giving: PeerGiving
    ) -> None:
        self._runtime = runtime
        self._generate = generate
        self._endpoint = str(EndpointAddress(generate.namespace, generate.component, KV))
        self._peers = peers
        self._giving = giving
        self._client: EndpointClient | None = None

    async def start(self) -> None:
        """Others are answered from now on."""
        server = self._runtime.server
        server.add(self._endpoint, InstanceId(""), server.generator(self._giving.give, decoder(Bring)))
        self._client = await self._runtime.client(self._generate)

    def begin(self, me: InstanceId) -> None:
        """Others are asked from now on."""
        self._peers.connect(self._ask, me)

    async def close(self) -> None:
        self._giving.close()
        self._runtime.server.remove(self._endpoint)
        if self._client is not None:
            await self._client.close()

    @asynccontextmanager
    async def _ask(self, instance_id: InstanceId, bring: Bring) -> AsyncIterator[Brought]:
        assert self._client is not None
        to = Destination(self._client.instance(instance_id).address, self._endpoint)
        async with await open_stream(self._runtime.plane, to, bring, _DEADLINES, _decode_brought) as answers:
            brought: Brought | None = await anext(answers, None)
            if brought is None:
                raise ProtocolError("the worker's answer has no beginning", rule="kv")
            yield brought
