"""InFlight: requests that the engine has, and the filter for outdated step outputs. Pure.

Commands and steps cross in transit: a step that was made before an abort arrived may mention the aborted
request, whose id may be in use again. Steps carry the number of commands handled before them, and InFlight
knows the command number of each request.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvolt.core.delta import StepOutput
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.native.shell.messages import Step
from kvolt.engines.step_queue import without_requests


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request that the engine has."""

    since: int
    """Number of its Submit command."""
    num_choices: int
    """Choices that have not ended."""


class InFlight:
    def __init__(self) -> None:
        self.num_sequences = 0
        """Unfinished choices of all requests."""
        self._entries: dict[RequestId, InFlightRequest] = {}
        self._last_drop = 0
        self._batch: tuple[RequestId, ...] = ()
        """The last plain ids received: the same object while they stay the same."""

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, request_id: RequestId) -> InFlightRequest | None:
        return self._entries.get(request_id)

    def add(self, request: Request, number: int) -> None:
        """Record a request sent by command `number`."""
        num_choices = len(request.open_choices)
        self._entries[request.request_id] = InFlightRequest(number, num_choices)
        self.num_sequences += num_choices

    def drop(self, request_id: RequestId, number: int) -> None:
        """Drop a request by command `number`: its later outputs are filtered."""
        self._close(request_id)
        self._last_drop = number

    def clear(self) -> None:
        self._entries.clear()
        self.num_sequences = 0

    def filter_step(self, step: Step) -> StepOutput | None:
        """The step's output without dropped requests; None if nothing is left."""
        if step.plain_ids is not None:
            self._batch = step.plain_ids
        output = StepOutput(
            step.deltas,
            step.failed,
            step.load,
            self._batch if step.plain_tokens else (),
            step.plain_tokens,
            step.kv_changes,
        )
        if step.num_seen < self._last_drop:
            output = self._current(output, step.num_seen)
        for request_id, delta in output.deltas:
            if delta.finish is not None:
                self._end_choice(request_id)
        for request_id, _ in output.failed:
            self._close(request_id)
        return output if _has_content(output) else None

    def _current(self, output: StepOutput, num_seen: int) -> StepOutput:
        """Remove outputs of requests that the engine had not yet dropped."""
        named = {request_id for request_id, _ in (*output.deltas, *output.failed)}
        dropped = {
            request_id
            for request_id in named.union(output.plain_ids)
            if (entry := self._entries.get(request_id)) is None or entry.since > num_seen
        }
        return without_requests(output, dropped) if dropped else output

    def _end_choice(self, request_id: RequestId) -> None:
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.num_choices -= 1
        self.num_sequences -= 1
        if not entry.num_choices:
            del self._entries[request_id]

    def _close(self, request_id: RequestId) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.num_sequences -= entry.num_choices


def _has_content(output: StepOutput) -> bool:
    return bool(
        output.plain_ids or output.deltas or output.load is not None or output.failed or output.kv_changes
    )
