"""Admission control: a limit of concurrent requests, and busy thresholds of a model's workers.

A request is rejected only if every candidate worker is busy. Worker loads arrive over the event plane.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from kvolt.core.endpoints import LOAD_TOPIC, Instance
from kvolt.core.errors import MALFORMED, Overloaded
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.frontend.openai_api.responses import BusyThreshold
from kvolt.frontend.shared_count import SharedSlot
from kvolt.runtime.events.port import EventPlane

log = logging.getLogger(__name__)

_MAX_WORKERS = 65_536

_decode_report = msgspec.msgpack.Decoder(LoadReport).decode


class LatestLoads:
    """Latest load report of each worker."""

    def __init__(self) -> None:
        self._loads: dict[str, dict[str, WorkerLoad]] = {}
        """By identity of the process that reported and instance id: another one cannot report in its name."""
        self._num_loads = 0

    def get(self, instance: Instance) -> WorkerLoad | None:
        return self._loads.get(instance.identity, {}).get(instance.id)

    def update(self, report: LoadReport, identity: str = "") -> None:
        own = self._loads.setdefault(identity, {})
        if own.pop(report.instance, None) is None:
            self._num_loads += 1
        own[report.instance] = report.load
        if self._num_loads > _MAX_WORKERS:
            self._drop_one()

    def _drop_one(self) -> None:
        """Drop a report of the process with the most: one that invents workers displaces no others."""
        identity, loads = max(self._loads.items(), key=lambda each: len(each[1]))
        del loads[next(iter(loads))]  # the longest silent worker is the likeliest to be gone
        if not loads:
            del self._loads[identity]
        self._num_loads -= 1

    async def subscribe(self, events: EventPlane) -> None:
        """Apply load reports until cancelled or until the event plane closes."""
        async for event in events.subscribe(LOAD_TOPIC):
            try:
                self.update(_decode_report(event.payload), event.identity)
            except MALFORMED:
                log.debug("ignoring undecodable load report: publisher=%s", event.publisher)


class Admission:
    """Rejects requests over the limits with Overloaded, which carries a retry delay.

    With a shared slot the request limit applies to all processes of the frontend together.
    """

    def __init__(self, loads: LatestLoads, max_requests: int, shared: SharedSlot | None = None) -> None:
        self._loads = loads
        self._max_requests = max_requests
        self._shared = shared
        self._thresholds: dict[str, BusyThreshold] = {}
        self.num_running = 0

    def acquire(self) -> Callable[[], None]:
        """Admit a request and return its release function, to be called once. Raises Overloaded at the limit."""
        shared = self._shared
        self.num_running += 1
        # Increment before reading: of two processes that race for the last place both may fail, but never both win.
        num_running = self.num_running if shared is None else shared.set_count(self.num_running)
        if num_running > self._max_requests:
            self._release()
            raise Overloaded(
                f"the server is at its limit of {self._max_requests} concurrent requests; try again later",
                queue="requests",
                limit=self._max_requests,
                retry_after_s=1,
                gpu_work="none",
            )
        return self._release

    def _release(self) -> None:
        self.num_running -= 1
        if self._shared is not None:
            self._shared.set_count(self.num_running)

    def threshold(self, model: str) -> BusyThreshold:
        return self._thresholds.get(model) or BusyThreshold(model=model)

    def set_threshold(self, update: BusyThreshold) -> BusyThreshold:
        """Update the thresholds that are not None and return the result."""
        updates = {
            name: value for name in update.__struct_fields__ if (value := getattr(update, name)) is not None
        }
        changed = msgspec.structs.replace(self.threshold(update.model), **updates)
        self._thresholds[update.model] = changed
        return changed

    def put_threshold(self, threshold: BusyThreshold) -> None:
        """Replace all thresholds of a model by those of another process."""
        self._thresholds[threshold.model] = threshold

    def check(self, model: str, candidates: Sequence[Instance], max_batch_tokens: int) -> None:
        threshold = self._thresholds.get(model)
        if threshold is None or not candidates:
            return
        for instance in candidates:
            load = self._loads.get(instance)
            if load is None or not is_busy(load, threshold, max_batch_tokens):
                return
        raise Overloaded(
            f"all {len(candidates)} workers of {model!r} are busy; try again later",
            queue="workers",
            limit=len(candidates),
            retry_after_s=1,
            gpu_work="none",
        )


def is_busy(load: WorkerLoad, threshold: BusyThreshold, max_batch_tokens: int) -> bool:
    """Whether a load exceeds any threshold. An idle worker is never busy: it would not report again before it got a
    request, and its last report describes a finished step."""
    if not load.running and not load.waiting:
        return False
    blocks = threshold.active_decode_blocks_threshold
    if blocks is not None and load.kv_total_blocks and load.kv_used_blocks > blocks * load.kv_total_blocks:
        return True
    prefilling = load.step.prefill_tokens if load.step is not None else 0
    tokens = threshold.active_prefill_tokens_threshold
    if tokens is not None and prefilling > tokens:
        return True
    fraction = threshold.active_prefill_tokens_threshold_frac
    return fraction is not None and prefilling > fraction * max_batch_tokens
