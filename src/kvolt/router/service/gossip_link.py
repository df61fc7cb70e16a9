"""GossipLink: drives the gossip of one router over the event plane.

Owns when it is told and heard; what that means is `gossip`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvolt.core.endpoints import ROUTER_LOAD_TOPIC
from kvolt.router.service.gossip import GossipOptions, LoadVector, OtherLoads, PlaceBookings, Teller
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.events.port import EventStream
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)


class SharedLoads(Protocol):
    """Who keeps a router's bookings."""

    def own_loads(self) -> Sequence[PlaceBookings]:
        """Its own, of the places where there are any."""
        ...

    def set_others(self, load: PlaceBookings) -> None:
        """What all others have at a place. Not an error for one that is not known."""
        ...


class _Envelope(msgspec.Struct, frozen=True):
    """A LoadVector of which only the endpoint is read: a process has a router for each model."""

    endpoint: str


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_vector = msgspec.msgpack.Decoder(LoadVector).decode
_encode = msgspec.msgpack.Encoder().encode


class GossipLink:
    """See the module. `start`, then `close`."""

    def __init__(
        self,
        client: EndpointClient,
        runtime: Runtime,
        loads: SharedLoads,
        options: GossipOptions | None = None,
    ) -> None:
        self._client = client
        self._runtime = runtime
        self._loads = loads
        self._options = options or GossipOptions()
        self._endpoint = str(client.endpoint)
        self._clock = runtime.ports.clock
        # A process has another name on the event plane at each start, and may make a router for an endpoint again.
        epoch = int(self._clock.wall() * 1000)
        self._teller = Teller(self._endpoint, runtime.events.publisher, epoch, self._options)
        self._crew = Crew(f"gossip {client.endpoint}")
        self._stream: EventStream | None = None
        self._company = asyncio.Event()
        """Somebody is heard."""
        self.others = OtherLoads(runtime.events.publisher)
        self.num_told = 0
        self.num_malformed = 0

    def start(self) -> None:
        self._stream = self._runtime.events.subscribe(ROUTER_LOAD_TOPIC)
        self._client.on_change(self.others.change_all)
        self._crew.start(self._read(self._stream), "read")
        self._crew.start(self._tell(), "tell")

    async def close(self) -> None:
        """Takes leave, if it was started. Safe to repeat."""
        await self._crew.close()
        if self._stream is not None:
            self._publish(self._teller.leave())
            await self._stream.aclose()
            self._stream = None

    async def _read(self, stream: EventStream) -> None:
        async for event in stream:
            try:
                if _decode_envelope(event.payload).endpoint != self._endpoint:
                    continue
                vector = _decode_vector(event.payload)
            except MALFORMED as error:
                self.num_malformed += 1
                log.debug("the load of another router cannot be read: %s", error)
                continue
            self.others.hear(vector, self._clock.monotonic())
            if self.others.num_replicas:
                self._company.set()
            self._apply()

    async def _tell(self) -> None:
        options, others = self._options, self.others
        while True:
            now = self._clock.monotonic()
            for name in others.expire(now):
                log.info("router %s is silent: what it had under way counts no more", name)
            self._apply()
            vector = self._teller.due(self._loads.own_loads(), now, is_alone=not others.num_replicas)
            if vector is not None:
                self._publish(vector)
            if others.num_replicas or self._teller.is_greeting:
                await asyncio.sleep(options.period_s)
            else:
                await self._wait_for_company(options.heartbeat_s)

    async def _wait_for_company(self, timeout_s: float) -> None:
        """With nobody to tell it to there is nothing to do: most processes have the only router there is."""
        self._company.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._company.wait()
        except TimeoutError:
            pass

    def _publish(self, vector: LoadVector) -> None:
        self.num_told += 1
        self._runtime.events.publish(ROUTER_LOAD_TOPIC, _encode(vector))

    def _apply(self) -> None:
        now = self._clock.monotonic()
        for place in self.others.take_changed():
            self._loads.set_others(self.others.of(place, now))
