"""A KvRouter that is fed by its workers: their KV events go into an index, their load reports into the book, and so
does what other routers tell that send to the same workers. Who tells no events is known by our own decisions.

Owns the feeds: they begin with it and end with `close`.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvolt.core.endpoints import LOAD_TOPIC
from kvolt.core.errors import KvoltError
from kvolt.core.ids import InstanceId
from kvolt.core.load import LoadReport
from kvolt.router.index.approximate import ApproximateOptions
from kvolt.router.index.hybrid import MixedHolders
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.ingest.ingest import KvIngest
from kvolt.router.kv_router import KvRouter
from kvolt.router.policy.custom import CustomPolicy
from kvolt.router.policy.policy import Policy
from kvolt.router.policy.registry import shadow_of
from kvolt.router.port import RouterContext
from kvolt.router.service.gossip_link import GossipLink
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_decode_report = msgspec.msgpack.Decoder(LoadReport).decode

_RELOAD_S = 10.0
"""A file that cannot be read for longer, or whose code hangs, is left alone until the next time."""


class ExactRouter(KvRouter):
    """See the module; a Router."""

    def __init__(self, context: RouterContext, policy: Policy) -> None:
        runtime, settings = context.runtime, context.settings
        now = runtime.ports.clock.monotonic
        self.index = BlockIndex(settings.index_max_bytes)
        self.ingest = KvIngest(context.client, runtime, self.index, context.block_size)
        self.holders = MixedHolders(
            self.ingest if settings.events else None,
            now,
            ApproximateOptions(ttl_s=settings.approximate_ttl_s, max_bytes=settings.approximate_max_bytes),
        )
        super().__init__(
            context.client,
            self.holders,
            policy,
            now,
            runtime.ports.rng,
            settings,
            context.role,
            watch=self.holders,
        )
        self._crew = Crew(f"loads of {context.client.endpoint}")
        self._loads = runtime.events.subscribe(LOAD_TOPIC)
        self._crew.start(self._read_loads(), "loads")
        self.custom_policies = [
            each for each in (policy, *self._second_opinion(settings)) if isinstance(each, CustomPolicy)
        ]
        """Somebody's own: the one that decides, the one that is only asked, both or neither."""
        for custom in self.custom_policies if settings.reload_s else ():
            self._crew.start(self._follow(custom, context), f"file of {custom.name}")
        if settings.events:
            self.ingest.start()
        self.gossip = GossipLink(context.client, runtime, self)
        if settings.gossip:
            self.gossip.start()

    async def close(self) -> None:
        await self.gossip.close()
        await self._crew.close()
        await self._loads.aclose()
        await self.ingest.close()

    def held_by(self, instance_id: InstanceId) -> str:
        if not self.holders.is_approximate(instance_id):
            return f"events, {self.ingest.state_of(instance_id).value}"
        if not self.holders.trust.is_trusted(instance_id):
            return "own decisions: its reports are not what its events promise"
        why = self.ingest.why_refused(instance_id)
        return "own decisions" if why is None else f"own decisions: {why}"

    def _second_opinion(self, settings: RouterSettings) -> list[Policy]:
        shadow = shadow_of(settings)
        if shadow is None:
            return []
        self.selector.shadow = shadow[0]
        return [shadow[1]]

    async def _follow(self, custom: CustomPolicy, context: RouterContext) -> None:
        ports = context.runtime.ports
        while True:
            await asyncio.sleep(context.settings.reload_s)
            try:
                await ports.blocking.run(custom.reload_if_changed, _RELOAD_S)
            except KvoltError as error:
                log.warning("the file of the policy %s cannot be looked at: %s", custom.name, error.message)

    async def _read_loads(self) -> None:
        async for event in self._loads:
            try:
                self.on_report(_decode_report(event.payload))
            except MALFORMED as error:
                log.debug("a load report cannot be read: %s", error)
