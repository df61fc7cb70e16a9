"""A KvRouter that is fed by its workers: their KV events go into an index, their load reports into the book.

Owns the two feeds: they begin with it and end with `close`.
"""

from __future__ import annotations

import logging

import msgspec

from kvolt.core.endpoints import LOAD_TOPIC
from kvolt.core.load import LoadReport
from kvolt.router.index import BlockIndex
from kvolt.router.ingest import KvIngest
from kvolt.router.kv_router import KvRouter
from kvolt.router.policy import Policy
from kvolt.router.port import RouterContext
from kvolt.runtime.tasks import Crew
from kvolt.runtime.wire import MALFORMED

log = logging.getLogger(__name__)

_decode_report = msgspec.msgpack.Decoder(LoadReport).decode


class ExactRouter(KvRouter):
    """See the module; a Router."""

    def __init__(self, context: RouterContext, policy: Policy) -> None:
        runtime = context.runtime
        self.index = BlockIndex()
        self.ingest = KvIngest(context.client, runtime, self.index, context.block_size)
        super().__init__(
            context.client, self.ingest, policy, runtime.ports.clock.monotonic, runtime.ports.rng
        )
        self._crew = Crew(f"loads of {context.client.endpoint}")
        self._loads = runtime.events.subscribe(LOAD_TOPIC)
        self._crew.start(self._read_loads(), "loads")
        self.ingest.start()

    async def close(self) -> None:
        await self._crew.close()
        await self._loads.aclose()
        await self.ingest.close()

    async def _read_loads(self) -> None:
        async for event in self._loads:
            try:
                self.on_report(_decode_report(event.payload))
            except MALFORMED as error:
                log.debug("a load report cannot be read: %s", error)
