"""The HTTP processes that share one port, to each other: one set of metrics, one set of thresholds.

They find each other through discovery, under a component named after their group, and ask each other over
the request plane. One that does not answer in time is left out: an edge that lost a process still answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvolt.core.errors import KvoltError
from kvolt.core.ids import InstanceId
from kvolt.frontend.admission import Admission
from kvolt.frontend.metrics.merged_metrics import Exposition, merge, render, snapshot
from kvolt.frontend.openai_api.responses import BusyThreshold
from kvolt.runtime.endpoint.address import EndpointAddress, Instance
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.streams import Decode
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_ASK_S = 1.0
_LIMITS = Deadlines(connect_s=_ASK_S, first_s=_ASK_S, between_s=_ASK_S, total_s=_ASK_S)
_MAX_THRESHOLDS = 4096
_GATHER_S = 0.1
"""Changes of the group come in bursts, when it starts."""


def sibling_endpoint(namespace: str, group: str) -> EndpointAddress:
    """Where the processes of one group ask each other."""
    return EndpointAddress(namespace, f"frontend-{group}", "sibling")


class Group(msgspec.Struct, frozen=True):
    """Who we are among our siblings."""

    slot: int
    num_processes: int


class ShowMetrics(msgspec.Struct, frozen=True, tag=True):
    """Answered by an Exposition."""


class Stamped(msgspec.Struct, frozen=True):
    """A threshold and when it was set: by number, and by process where two had the same idea at once."""

    version: int
    slot: int
    threshold: BusyThreshold

    @property
    def stamp(self) -> tuple[int, int]:
        return self.version, self.slot


class Thresholds(msgspec.Struct, frozen=True, tag=True):
    """All that the sender knows; answered by all that the receiver knows. So either side is told."""

    known: list[Stamped]


_decode_exposition = msgspec.msgpack.Decoder(Exposition).decode
_decode_thresholds = msgspec.msgpack.Decoder(Thresholds).decode


class ThresholdBook:
    """The thresholds with their stamps. Whatever the order of news, all books end up equal."""

    def __init__(self, admission: Admission, slot: int) -> None:
        self._admission = admission
        self._slot = slot
        self._known: dict[str, Stamped] = {}

    def set(self, wanted: BusyThreshold) -> BusyThreshold:
        """By a client of ours."""
        changed = self._admission.set_threshold(wanted)
        version = 1 + max((stamped.version for stamped in self._known.values()), default=0)
        self._known[changed.model] = Stamped(version, self._slot, changed)
        return changed

    def learn(self, news: Sequence[Stamped]) -> None:
        for stamped in news:
            model = stamped.threshold.model
            known = self._known.get(model)
            if known is None and len(self._known) >= _MAX_THRESHOLDS:
                continue
            if known is None or known.stamp < stamped.stamp:
                self._known[model] = stamped
                self._admission.put_threshold(stamped.threshold)

    def all(self) -> Thresholds:
        return Thresholds(list(self._known.values()))


class Siblings:
    """Our part in the group. `start` before the port is opened, so that no request meets old thresholds."""

    def __init__(
        self,
        runtime: Runtime,
        endpoint: EndpointAddress,
        group: Group,
        admission: Admission,
        registry: Collector,
        metrics_prefix: str = "dynamo_frontend",
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._group = group
        self._registry = registry
        self._metrics_prefix = metrics_prefix
        self._book = ThresholdBook(admission, group.slot)
        self._last_words: dict[str, Exposition] = {}
        """By process, of which there are as many as the group has places."""
        self._client: EndpointClient | None = None
        self._own: InstanceId | None = None
        self._news = asyncio.Event()
        self._crew = Crew("siblings")

    async def start(self) -> None:
        instance = await self._runtime.serve(self._endpoint, self._serve, ShowMetrics | Thresholds)
        self._own = instance.id
        self._client = await self._runtime.client(self._endpoint)
        await self._client.wait_synced(_ASK_S)
        await self._exchange()
        # One that comes, or comes back, may know what we do not, and the other way round.
        self._client.on_change(self._news.set)
        self._crew.start(self._keep_equal(), "thresholds")

    async def close(self) -> None:
        await self._crew.close()

    async def set_threshold(self, wanted: BusyThreshold) -> BusyThreshold:
        """Here and, before it returns, at every sibling that can be reached."""
        changed = self._book.set(wanted)
        await self._exchange()
        return changed

    async def metrics(self) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, for all of us, and its content type."""
        answers: list[Exposition] = await self._ask_all(ShowMetrics(), _decode_exposition)
        answers.append(self._snapshot())
        # A counter must not go down because one was too busy to answer: its last figures stand in for it.
        silent = self._last_words.keys() - {answer.process for answer in answers}
        self._last_words.update((answer.process, answer) for answer in answers)
        metrics = merge(
            [*answers, *(self._last_words[name] for name in sorted(silent))], self._metrics_prefix
        )
        processes = GaugeMetricFamily(
            "kvolt_frontend_processes",
            "HTTP processes of this edge: in these figures, or left out since they did not answer",
            labels=("answer",),
        )
        processes.add_metric(("given",), len(answers))
        processes.add_metric(("missing",), max(self._group.num_processes - len(answers), 0))
        return render([*metrics, processes]), CONTENT_TYPE_LATEST

    # ---

    async def _serve(self, question: ShowMetrics | Thresholds) -> AsyncIterator[Exposition | Thresholds]:
        if isinstance(question, ShowMetrics):
            yield self._snapshot()
        else:
            self._book.learn(question.known)
            yield self._book.all()

    def _snapshot(self) -> Exposition:
        return snapshot(self._registry, self._runtime.options.name)

    async def _keep_equal(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(_GATHER_S)
            self._news.clear()
            await self._exchange()

    async def _exchange(self) -> None:
        answers: list[Thresholds] = await self._ask_all(self._book.all(), _decode_thresholds)
        for answer in answers:
            self._book.learn(answer.known)

    async def _ask_all(self, question: ShowMetrics | Thresholds, decode: Decode) -> list[Any]:
        assert self._client is not None, "start() first"
        others = [instance for instance in self._client.candidates() if instance.id != self._own]
        answers = await asyncio.gather(*(self._ask(instance, question, decode) for instance in others))
        return [answer for answer in answers if answer is not None]

    async def _ask(self, instance: Instance, question: ShowMetrics | Thresholds, decode: Decode) -> Any:
        assert self._client is not None
        try:
            async with await self._client.stream(question, instance, _LIMITS, decode) as stream:
                return await anext(stream, None)
        except KvoltError as error:
            log.info("%s does not answer: %s", instance.process, error.message)
            return None
