"""Coordination of the frontend processes that share one port: common metrics and busy thresholds.

The processes find each other through discovery, as instances of one component, and call each other over the request
plane. A process that does not respond in time is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import KvoltError
from kvolt.core.ids import InstanceId
from kvolt.frontend.admission import Admission
from kvolt.frontend.metrics.merged_metrics import Exposition, merge, render, snapshot
from kvolt.frontend.openai_api.responses import BusyThreshold
from kvolt.runtime.config.settings import AliasScheme
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.metric_families import gauge
from kvolt.runtime.plane.streams import Decode
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 1.0
_DEADLINES = Deadlines(
    connect_s=_CALL_TIMEOUT_S, first_s=_CALL_TIMEOUT_S, between_s=_CALL_TIMEOUT_S, total_s=_CALL_TIMEOUT_S
)
_MAX_THRESHOLDS = 4096
_DEBOUNCE_S = 0.1
"""Debounce: group changes come in bursts at start."""


def sibling_endpoint(namespace: str, group: str) -> EndpointAddress:
    """Endpoint of the processes of one group."""
    return EndpointAddress(namespace, f"frontend-{group}", "sibling")


class SiblingGroup(msgspec.Struct, frozen=True):
    """Position of this process in its group."""

    slot: int
    num_processes: int


class ShowMetrics(msgspec.Struct, frozen=True, tag=True):
    """Request for metrics; the response is an Exposition."""


class VersionedThreshold(msgspec.Struct, frozen=True):
    """A threshold with a Lamport version; the process slot breaks ties."""

    version: int
    slot: int
    threshold: BusyThreshold

    @property
    def stamp(self) -> tuple[int, int]:
        return self.version, self.slot


class ThresholdExchange(msgspec.Struct, frozen=True, tag=True):
    """All thresholds of the sender; the response has all thresholds of the receiver."""

    known: list[VersionedThreshold]


_decode_exposition = msgspec.msgpack.Decoder(Exposition).decode
_decode_thresholds = msgspec.msgpack.Decoder(ThresholdExchange).decode


class ReplicatedThresholds:
    """Versioned thresholds, which converge in all processes whatever the order of updates."""

    def __init__(self, admission: Admission, slot: int) -> None:
        self._admission = admission
        self._slot = slot
        self._known: dict[str, VersionedThreshold] = {}

    def set(self, update: BusyThreshold) -> BusyThreshold:
        """Apply an update of a client of this process."""
        changed = self._admission.set_threshold(update)
        version = 1 + max((stamped.version for stamped in self._known.values()), default=0)
        self._known[changed.model] = VersionedThreshold(version, self._slot, changed)
        return changed

    def merge(self, updates: Sequence[VersionedThreshold]) -> None:
        for stamped in updates:
            model = stamped.threshold.model
            known = self._known.get(model)
            if known is None and len(self._known) >= _MAX_THRESHOLDS:
                continue
            if known is None or known.stamp < stamped.stamp:
                self._known[model] = stamped
                self._admission.put_threshold(stamped.threshold)

    def all(self) -> ThresholdExchange:
        return ThresholdExchange(list(self._known.values()))


class Siblings:
    """Membership of this process in its group. Start it before the port opens, so that thresholds are current."""

    def __init__(
        self,
        runtime: Runtime,
        endpoint: EndpointAddress,
        group: SiblingGroup,
        admission: Admission,
        registry: Collector,
        aliases: AliasScheme = "none",
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._group = group
        self._registry = registry
        self._aliases = aliases
        self._thresholds = ReplicatedThresholds(admission, group.slot)
        self._last_expositions: dict[str, Exposition] = {}
        """Latest metrics by process. Bounded by the group size."""
        self._client: EndpointClient | None = None
        self._own: InstanceId | None = None
        self._group_changed = asyncio.Event()
        self._task_group = TaskGroup("siblings")

    async def start(self) -> None:
        instance = await self._runtime.serve(self._endpoint, self._serve, ShowMetrics | ThresholdExchange)
        self._own = instance.id
        self._client = await self._runtime.client(self._endpoint)
        await self._client.wait_synced(_CALL_TIMEOUT_S)
        await self._exchange()
        # A process that joins or returns may have newer thresholds, or older ones.
        self._client.on_change(self._group_changed.set)
        self._task_group.start(self._exchange_on_change(), "thresholds")

    async def close(self) -> None:
        await self._task_group.close()

    async def set_threshold(self, update: BusyThreshold) -> BusyThreshold:
        """Set a threshold here and in every reachable process before returning."""
        changed = self._thresholds.set(update)
        await self._exchange()
        return changed

    async def metrics(self) -> tuple[bytes, str]:
        """Merged Prometheus text of all processes, and its content type."""
        answers: list[Exposition] = await self._call_all(ShowMetrics(), _decode_exposition)
        answers.append(self._snapshot())
        # A counter must not decrease because a process was too busy to respond: use its previous metrics.
        missing = self._last_expositions.keys() - {answer.process for answer in answers}
        self._last_expositions.update((answer.process, answer) for answer in answers)
        metrics = merge([*answers, *(self._last_expositions[name] for name in sorted(missing))])
        num_missing = max(self._group.num_processes - len(answers), 0)
        processes = gauge(
            "kvolt_frontend_processes",
            "HTTP processes of this frontend, by whether they responded to this scrape (received) or not (missing)",
            ("response",),
            [(("received",), len(answers)), (("missing",), num_missing)],
        )
        return render([*metrics, processes], self._aliases), CONTENT_TYPE_LATEST

    # ---

    async def _serve(
        self, message: ShowMetrics | ThresholdExchange
    ) -> AsyncIterator[Exposition | ThresholdExchange]:
        if isinstance(message, ShowMetrics):
            yield self._snapshot()
        else:
            self._thresholds.merge(message.known)
            yield self._thresholds.all()

    def _snapshot(self) -> Exposition:
        return snapshot(self._registry, self._runtime.options.name)

    async def _exchange_on_change(self) -> None:
        while True:
            await self._group_changed.wait()
            await asyncio.sleep(_DEBOUNCE_S)
            self._group_changed.clear()
            await self._exchange()

    async def _exchange(self) -> None:
        answers: list[ThresholdExchange] = await self._call_all(self._thresholds.all(), _decode_thresholds)
        for answer in answers:
            self._thresholds.merge(answer.known)

    async def _call_all(self, message: ShowMetrics | ThresholdExchange, decode: Decode) -> list[Any]:
        assert self._client is not None, "start() first"
        others = [instance for instance in self._client.candidates() if instance.id != self._own]
        answers = await asyncio.gather(*(self._call(instance, message, decode) for instance in others))
        return [answer for answer in answers if answer is not None]

    async def _call(
        self, instance: Instance, message: ShowMetrics | ThresholdExchange, decode: Decode
    ) -> Any:
        assert self._client is not None
        try:
            async with await self._client.stream(message, instance, _DEADLINES, decode) as stream:
                return await anext(stream, None)
        except KvoltError as error:
            log.info("frontend process did not respond: process=%s error=%s", instance.process, error.message)
            return None
