"""Discovery of, and requests to, peer workers that share KV.

Uses the request plane; the endpoint is not registered in discovery but reached at the address of `generate`, so it
also answers while a worker is cordoned. Transfer agents move the bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from kvolt.core.endpoints import KV, EndpointAddress
from kvolt.core.errors import ProtocolError
from kvolt.core.ids import InstanceId
from kvolt.kv.peers.server import PeerServer
from kvolt.kv.peers.tier import PeerTier
from kvolt.kv.shared_pool.wire import FetchBlocks, FetchResult
from kvolt.runtime.endpoint.call import Deadlines, open_stream
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.endpoint.server import msgpack_decoder
from kvolt.runtime.plane.port import Destination, IncomingStream
from kvolt.runtime.runtime import Runtime

_DEADLINES = Deadlines(connect_s=1.0, first_s=5.0, between_s=20.0, total_s=20.0)

_decode_request = msgpack_decoder(FetchBlocks)
_decode_result = msgspec.msgpack.Decoder(FetchResult).decode


class PeerWorkers:
    """See the module. `start` before the worker registers, `connect` afterwards, `close` before its tiers."""

    def __init__(
        self, runtime: Runtime, generate: EndpointAddress, peers: PeerTier, peer_server: PeerServer
    ) -> None:
        self._runtime = runtime
        self._generate = generate
        self._endpoint = str(EndpointAddress(generate.namespace, generate.component, KV))
        self._peers = peers
        self._peer_server = peer_server
        self._client: EndpointClient | None = None

    async def start(self) -> None:
        """Start to serve peers."""
        self._runtime.server.register(self._endpoint, InstanceId(""), self._on_fetch)
        self._client = await self._runtime.client(self._generate)

    def _on_fetch(self, stream: IncomingStream) -> None:
        reader = "" if stream.peer_identity is None else stream.peer_identity.uri
        serve = self._runtime.server.wrap_generator(
            lambda request: self._peer_server.serve(request, reader), _decode_request
        )
        serve(stream)

    def connect(self, own_id: InstanceId) -> None:
        """Start to fetch blocks from peers."""
        self._peers.connect(self._fetch, own_id)

    async def close(self) -> None:
        self._peer_server.close()
        self._runtime.server.unregister(self._endpoint)
        if self._client is not None:
            await self._client.close()

    @asynccontextmanager
    async def _fetch(self, instance_id: InstanceId, request: FetchBlocks) -> AsyncIterator[FetchResult]:
        assert self._client is not None
        peer = self._client.get_instance(instance_id)
        to = Destination(peer.address, self._endpoint, peer.identity)
        async with await open_stream(self._runtime.plane, to, request, _DEADLINES, _decode_result) as results:
            result: FetchResult | None = await anext(results, None)
            if result is None:
                raise ProtocolError("the worker sent an empty response", rule="kv")
            yield result
