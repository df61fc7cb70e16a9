"""KvRouter fed by its workers: KV events update the prefix index, load reports and gossip update the load.

Workers without KV events are indexed from this router's own decisions. Owns the subscriptions: they start with it and
end with `close`.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvolt.core.endpoints import LOAD_TOPIC
from kvolt.core.errors import MALFORMED, KvoltError, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.load import LoadReport
from kvolt.router.gossip.link import GossipLink
from kvolt.router.index.approximate import ApproximateOptions
from kvolt.router.index.hybrid import HybridIndex
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.ingest.ingest import KvIngest
from kvolt.router.kv_router import KvRouter
from kvolt.router.policy.custom import CustomPolicy
from kvolt.router.policy.policy import Policy
from kvolt.router.policy.registry import shadow_policy
from kvolt.router.port import RouterContext
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_decode_report = msgspec.msgpack.Decoder(LoadReport).decode

_RELOAD_S = 10.0
"""Timeout of a policy reload: a file that cannot be read within it is skipped until the next check."""


class EventFedRouter(KvRouter):
    """A Router; see the module."""

    def __init__(self, context: RouterContext, policy: Policy) -> None:
        runtime, settings = context.runtime, context.settings
        now = runtime.ports.clock.monotonic
        self.block_index = BlockIndex(settings.index_max_bytes)
        self.ingest = KvIngest(context.client, runtime, self.block_index, context.block_size)
        self.prefix_index = HybridIndex(
            self.ingest if settings.events else None,
            now,
            ApproximateOptions(ttl_s=settings.approximate_ttl_s, max_bytes=settings.approximate_max_bytes),
        )
        super().__init__(
            context.client,
            self.prefix_index,
            policy,
            now,
            runtime.ports.rng,
            settings,
            context.role,
            observer=self.prefix_index,
        )
        self._task_group = TaskGroup(f"loads of {context.client.endpoint}")
        self._load_events = runtime.events.subscribe(LOAD_TOPIC)
        self._task_group.start(self._read_loads(), "loads")
        self.custom_policies = [
            each for each in (policy, self._install_shadow(settings)) if isinstance(each, CustomPolicy)
        ]
        """User-defined policies in use: the deciding one, the shadow, both or neither."""
        for custom in self.custom_policies if settings.reload_s else ():
            self._task_group.start(self._reload_on_change(custom, context), f"file of {custom.name}")
        if settings.events:
            self.ingest.start()
        self.gossip = GossipLink(context.client, runtime, self)
        if settings.gossip:
            self.gossip.start()

    async def close(self) -> None:
        await self.gossip.close()
        await self._task_group.close()
        await self._load_events.aclose()
        await self.ingest.close()

    def index_source(self, instance_id: InstanceId) -> str:
        if not self.prefix_index.is_approximate(instance_id):
            return f"events, {self.ingest.state_of(instance_id).value}"
        if not self.prefix_index.health.is_healthy(instance_id):
            return "own decisions: its reports differ from its KV events"
        reason = self.ingest.rejection_reason(instance_id)
        return "own decisions" if reason is None else f"own decisions: {reason}"

    def _install_shadow(self, settings: RouterSettings) -> Policy | None:
        self.selector.shadow, policy = shadow_policy(settings) or (None, None)
        return policy

    async def _reload_on_change(self, custom: CustomPolicy, context: RouterContext) -> None:
        ports = context.runtime.ports
        while True:
            await asyncio.sleep(context.settings.reload_s)
            try:
                await ports.blocking.run(custom.reload_if_changed, _RELOAD_S)
            except KvoltError as error:
                log.warning("policy reload failed: name=%s: %s", custom.name, error.message)

    async def _read_loads(self) -> None:
        async for event in self._load_events:
            try:
                report = _decode_report(event.payload)
                instance = self._client.get_instance(InstanceId(report.instance))
            except (*MALFORMED, Unavailable) as error:
                # Unavailable: of another endpoint, or not registered yet
                log.debug("load report dropped: %s", error)
                continue
            if not self.ingest.forged.is_forged(event, instance):
                self.on_report(report)
