"""Remote prefill of one request: the calls to prefill workers, the worker that holds the KV, and stage times.

Prefill-first, the prompt is computed before the answer is routed (`RemotePrompt.compute`). Decode-first, prefill and
decode worker have the request at the same time (`open_rendezvous`): a prefill worker is reserved, a rendezvous is
created, then both workers start.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.delta import StageTimes
from kvolt.core.endpoints import Instance
from kvolt.core.errors import MALFORMED, Cancelled, DeadlineExceeded, KvoltError, Unavailable
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import RENDEZVOUS_ADDRESS_KEY, Handoff, LinkCosts, Rendezvous, Request
from kvolt.journey.context import JourneyStats
from kvolt.journey.prefill import PrefillCall, RoleTarget, release_prompt
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_RESERVE_S = 5.0
"""Longest wait for a prefill worker beyond the predicted one; the decode worker is reserved already."""
_MAILBOX_BITS = 62
"""Mailboxes of a prompt's parts are numbered from the rendezvous' and must fit 64 bits."""

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


class RemotePrompt:
    """See the module. Call `release` when the request is over."""

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
        self.num_failures = 0

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
        log.info("remote prefill failed: request_id=%s reason=%s", self.request.request_id, error.message)
        self.num_failures += 1
        self._stats.prefill_failures[error.code] += 1

    def _count(self, call: PrefillCall) -> None:
        self._stats.num_prefills += 1
        self.decision = call.decision
        if self.stages is not None:
            self.stages = self.stages.updated(call.stages).updated(
                StageTimes(prefill_ms=call.prefill_s * 1e3)
            )

    def on_fetched(self) -> None:
        """The decode worker has the KV, or continues without."""
        self._holder = None

    def merge_stages(self, stages: StageTimes) -> bool:
        """Add the times of the decode worker. True if the KV came from this prefill."""
        if self.stages is None:
            return False
        self.stages = stages.updated(self.stages)
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


async def open_rendezvous(
    prompt: RemotePrompt,
    request: Request,
    attempt: int,
    links: LinkCosts | None,
    time_left: Callable[[], Deadlines],
    is_done: Callable[[], bool],
) -> Request:
    """Start prefill and return the request for the decode worker, with the rendezvous address.

    Without a prefill worker the decode worker computes the prompt itself. `links`: transfer costs to the decode worker.
    `is_done`: whether the journey has ended.
    """
    local_request = msgspec.structs.replace(request, rendezvous=None)
    prompt.cancel()  # prefill for a decode worker that failed
    if request.has_prior_tokens or not prompt.target.candidates():
        return local_request
    # An id per attempt: the previous attempt's prompt may still be released on the same worker.
    request_id = prompt.request.request_id
    call = prompt.new_call(RequestId(f"{request_id}/{attempt}"))
    # A router holds a prompt until its worker has computed those before it.
    wait_s = min(prompt.target.predict_queue_s(prompt.request) + _RESERVE_S, time_left().total_s)
    try:
        async with asyncio.timeout(wait_s):
            decision = await call.reserve(frozenset(), links)
    except TimeoutError:
        late = f"no prefill worker has room within {wait_s:g} s"
        prompt.count_failure(DeadlineExceeded(late, stage="route", after_s=wait_s))
        return local_request
    except KvoltError as error:
        prompt.count_failure(error)
        return local_request
    reader = "" if request.rendezvous is None else request.rendezvous.reader
    rendezvous = _new_rendezvous(decision.instance, reader)
    if rendezvous is None or is_done():
        call.release()
        return local_request
    prompt.start_call(call)
    prompt.task_group.start(_run_prefill(prompt, call, rendezvous, time_left), f"prompt {request_id}")
    return msgspec.structs.replace(request, rendezvous=rendezvous)


def _new_rendezvous(prefill: Instance, reader: str) -> Rendezvous | None:
    """None if the worker published no rendezvous address."""
    try:
        address = _decode_info(prefill.info).transfer_addresses.get(RENDEZVOUS_ADDRESS_KEY)
    except MALFORMED:
        return None
    return None if address is None else Rendezvous(secrets.randbits(_MAILBOX_BITS), address, reader)


async def _run_prefill(
    prompt: RemotePrompt, call: PrefillCall, rendezvous: Rendezvous, time_left: Callable[[], Deadlines]
) -> None:
    is_computed = False
    try:
        await call.compute(time_left(), rendezvous)
        is_computed = True
    except KvoltError as error:
        if not isinstance(error, Cancelled):
            prompt.count_failure(error)
    finally:
        prompt.finish_call(call, is_computed)
