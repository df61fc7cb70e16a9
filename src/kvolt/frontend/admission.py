"""Who is let in: a bound on requests at once, and thresholds above which a model's workers count as busy.

A request is refused only when every worker that could take it is busy: one that is free is the router's
to find. What workers say of their load comes over the event plane.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from kvolt.core.endpoints import LOAD_TOPIC
from kvolt.core.errors import Overloaded
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.frontend.openai_api.responses import BusyThreshold
from kvolt.frontend.shared_count import SharedSlot
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.events.port import EventPlane
from kvolt.runtime.plane.wire import MALFORMED

log = logging.getLogger(__name__)

_MAX_WORKERS = 65_536

_decode_report = msgspec.msgpack.Decoder(LoadReport).decode


class WorkerLoads:
    """The last word of each worker on its load."""

    def __init__(self) -> None:
        self._loads: dict[str, WorkerLoad] = {}

    def get(self, instance_id: str) -> WorkerLoad | None:
        return self._loads.get(instance_id)

    def put(self, report: LoadReport) -> None:
        self._loads.pop(report.instance, None)
        if (
            len(self._loads) >= _MAX_WORKERS
        ):  # those that have been silent longest are the likeliest to be gone
            del self._loads[next(iter(self._loads))]
        self._loads[report.instance] = report.load

    async def follow(self, events: EventPlane) -> None:
        """Until cancelled, or the event plane is closed."""
        async for event in events.subscribe(LOAD_TOPIC):
            try:
                self.put(_decode_report(event.payload))
            except MALFORMED:
                log.debug("%s published a load that this version does not understand", event.publisher)


class Admission:
    """Refuses with Overloaded, which says when to try again.

    With a shared slot the bound is over all processes that share its table.
    """

    def __init__(self, loads: WorkerLoads, max_requests: int, shared: SharedSlot | None = None) -> None:
        self._loads = loads
        self._max_requests = max_requests
        self._shared = shared
        self._thresholds: dict[str, BusyThreshold] = {}
        self.num_running = 0

    def enter(self) -> Callable[[], None]:
        """A place for a request; what gives it back, to be called once. Overloaded when there is none."""
        shared = self._shared
        self.num_running += 1
        # Counted before it is looked at: of two processes that take the last place at once, none may get it,
        # but never both.
        num_running = self.num_running if shared is None else shared.put(self.num_running)
        if num_running > self._max_requests:
            self._leave()
            raise Overloaded(
                f"{self._max_requests} requests are being answered; try again later",
                queue="requests",
                limit=self._max_requests,
                retry_after_s=1,
                gpu_work="none",
            )
        return self._leave

    def _leave(self) -> None:
        self.num_running -= 1
        if self._shared is not None:
            self._shared.put(self.num_running)

    def threshold(self, model: str) -> BusyThreshold:
        return self._thresholds.get(model) or BusyThreshold(model=model)

    def set_threshold(self, wanted: BusyThreshold) -> BusyThreshold:
        """What is left out or null stays as it is."""
        given = {
            name: value for name in wanted.__struct_fields__ if (value := getattr(wanted, name)) is not None
        }
        changed = msgspec.structs.replace(self.threshold(wanted.model), **given)
        self._thresholds[wanted.model] = changed
        return changed

    def put_threshold(self, threshold: BusyThreshold) -> None:
        """Whole, as another process has it."""
        self._thresholds[threshold.model] = threshold

    def check(self, model: str, candidates: Sequence[Instance], max_batch_tokens: int) -> None:
        threshold = self._thresholds.get(model)
        if threshold is None or not candidates:
            return
        for instance in candidates:
            load = self._loads.get(instance.id)
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
    """Over any threshold that is set. One with nothing to do never is: its last word tells of a step that is
    over, and there would be no other until it got a request."""
    if not load.running and not load.waiting:
        return False
    blocks = threshold.active_decode_blocks_threshold
    if blocks is not None and load.kv_total_blocks and load.kv_used_blocks > blocks * load.kv_total_blocks:
        return True
    prefilling = load.step.prefill_tokens if load.step is not None else 0
    tokens = threshold.active_prefill_tokens_threshold
    if tokens is not None and prefilling > tokens:
        return True
    share = threshold.active_prefill_tokens_threshold_frac
    return share is not None and prefilling > share * max_batch_tokens
