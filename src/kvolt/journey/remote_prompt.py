"""Remote prefill of one request: the calls to prefill workers, the worker that holds the KV, and stage times.

Prefill-first, the prompt is computed before the answer is routed (`RemotePrompt.compute`); decode-first, at the same
time (`decode_first.open_rendezvous`).
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.errors import KvoltError, Unavailable
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request
from kvolt.journey.prefill import PrefillCall, RoleTarget
from kvolt.journey.stats import JourneyStats
from kvolt.journey.withdrawal import release_prompt
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)


class RemotePrompt:
    """See the module. Call `release` when the request is over."""

    __slots__ = (
        "_call",
        "_finished_call",
        "_holder",
        "_stats",
        "decision",
        "last_instance_id",
        "request",
        "stages",
        "target",
        "task_group",
    )

    def __init__(
        self, target: RoleTarget, request: Request, task_group: TaskGroup, stats: JourneyStats
    ) -> None:
        """`task_group`: runs background work that the call does not wait for."""
        self.target = target
        self.request = request
        self.task_group = task_group
        self._stats = stats
        self._call: PrefillCall | None = None
        """In flight."""
        self._finished_call: PrefillCall | None = None
        self._holder: Instance | None = None
        """Worker that holds the KV until it is pulled."""
        self.last_instance_id: InstanceId | None = None
        """Prefill worker of the last `compute`."""
        self.decision: Decision | None = None
        """Where the prompt was computed."""
        self.stages: StageTimes | None = None

    @property
    def pending_decision(self) -> Decision | None:
        """Where the prompt is being computed."""
        return None if self._call is None else self._call.decision

    def new_call(self, name: RequestId) -> PrefillCall:
        """Create a call to one worker under this request id."""
        prefill_request = msgspec.structs.replace(self.request, request_id=name, prefill_only=True)
        return PrefillCall(self.target, prefill_request, self.task_group)

    async def compute(self, excluded: frozenset[InstanceId], deadlines: Deadlines) -> Handoff:
        """Compute the prompt on one worker. On KvoltError `last_instance_id` is the worker that failed."""
        self.last_instance_id = None
        if not self.target.candidates():  # all workers left since the mode was chosen
            raise Unavailable("no prefill worker can be reached", reason="no_workers")
        call = self._call = self.new_call(self.request.request_id)
        try:
            handoff = await call.run(excluded, deadlines)
        except KvoltError as error:
            self.count_failure(error)
            raise
        finally:
            self._call = None
            self.last_instance_id = None if call.decision is None else call.decision.instance.id
        assert call.decision is not None
        self._finished_call = call
        self._holder = call.decision.instance if handoff.ticket else None
        return handoff

    def accept(self) -> None:
        """The handoff is used."""
        assert self._finished_call is not None
        self.stages = StageTimes(queue_ms=self._finished_call.queue_s * 1e3)
        self._count(self._finished_call)

    # --- decode-first

    def start_call(self, call: PrefillCall) -> None:
        """Prefill starts, concurrently with the decode worker."""
        self._call = call
        self.stages = StageTimes(queue_ms=call.queue_s * 1e3)

    def finish_call(self, call: PrefillCall, is_computed: bool) -> None:
        """A started call ended; a later one may have replaced it."""
        if self._call is call:
            self._call = None
        if is_computed:
            self._count(call)

    def count_failure(self, error: KvoltError) -> None:
        """Count a failed prefill; another worker or the decode worker computes the prompt."""
        log.info("remote prefill failed: request=%s reason=%s", self.request.request_id, error.message)
        self._stats.prefill_failures[error.code] += 1

    def _count(self, call: PrefillCall) -> None:
        self._stats.num_prefills += 1
        self.decision = call.decision
        if self.stages is not None:
            self.stages = msgspec.structs.replace(self.stages, prefill_ms=call.prefill_s * 1e3)

    def on_fetched(self) -> None:
        """The decode worker has the KV, or continues without."""
        self._holder = None

    def merge_stages(self, stages: StageTimes) -> bool:
        """Add the transfer times of the decode worker. True if the KV came from this prefill."""
        if self.stages is None:
            return False
        self.stages = msgspec.structs.replace(stages, **_set_fields(self.stages))
        return True

    def cancel(self) -> None:
        """Stop the call in flight."""
        if self._call is not None:
            self._call.cancel()

    def release(self) -> None:
        """Release KV that was computed and not pulled."""
        self.cancel()
        holder, self._holder = self._holder, None
        if holder is not None:
            release_prompt(self.task_group, self.target.client.plane, holder, self.request.request_id)


def _set_fields(stages: StageTimes) -> dict[str, Any]:
    return {name: value for name in stages.__struct_fields__ if (value := getattr(stages, name)) is not None}
