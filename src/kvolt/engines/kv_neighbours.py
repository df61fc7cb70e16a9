"""Workers of a kind that give each other KV: who they are, how one is asked, and what it answers.

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
from kvolt.kv.tiers.peer_giving import PeerGiving
from kvolt.kv.tiers.peer_tier import PeerTier
from kvolt.kv.tiers.pool_wire import Bring, Brought
from kvolt.runtime.address import EndpointAddress, Instance
from kvolt.runtime.call import Deadlines
from kvolt.runtime.client import open_stream
from kvolt.runtime.plane import Destination
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.server import decoder

_DEADLINES = Deadlines(connect_s=1.0, first_s=10.0, between_s=30.0, total_s=30.0)

_decode_brought = msgspec.msgpack.Decoder(Brought).decode


async def meet_neighbours(runtime: Runtime, me: Instance, peers: PeerTier, giving: PeerGiving) -> None:
    """Ask others of the endpoint that `me` is of from now on, and answer them."""
    server = runtime.server
    server.add(str(_kv_of(me)), me.id, server.generator(giving.give, decoder(Bring)))
    client = await runtime.client(me.endpoint)

    @asynccontextmanager
    async def ask(instance_id: InstanceId, bring: Bring) -> AsyncIterator[Brought]:
        other = client.instance(instance_id)
        to = Destination(other.address, f"{_kv_of(other)}#{other.id}")
        async with await open_stream(runtime.plane, to, bring, _DEADLINES, _decode_brought) as answers:
            brought: Brought | None = await anext(answers, None)
            if brought is None:
                raise ProtocolError("the worker's answer has no beginning", rule="kv")
            yield brought

    peers.connect(ask, me.id)


def _kv_of(instance: Instance) -> EndpointAddress:
    return EndpointAddress(instance.endpoint.namespace, instance.endpoint.component, KV)
