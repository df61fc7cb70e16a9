"""Ledger: which requests the engine has, and which of its answers are still about them.

Commands and steps cross on their way. A request that was aborted may be in steps that the engine made before it
knew, and its id may be in use again by then: steps say how many commands they had seen, and the ledger knows by
which one each request came. Pure: knows no pipe and no loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvolt.core.delta import StepOutput
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.native.shell.messages import Step
from kvolt.engines.unread_steps import without


@dataclass(slots=True, eq=False)
class Entry:
    """A request that the engine has."""

    since: int
    """Number of the command that brought it."""
    num_choices: int
    """Those that have not ended."""


class Ledger:
    def __init__(self) -> None:
        self.num_sequences = 0
        """Choices of all requests that have not ended."""
        self._entries: dict[RequestId, Entry] = {}
        self._last_drop = 0
        self._batch: tuple[RequestId, ...] = ()
        """The plain ids as the engine told them last: the same object for as long as they stay the same."""

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, request_id: RequestId) -> Entry | None:
        return self._entries.get(request_id)

    def add(self, request: Request, number: int) -> None:
        """A request was sent by command `number`."""
        num_choices = len(request.open_choices)
        self._entries[request.request_id] = Entry(number, num_choices)
        self.num_sequences += num_choices

    def drop(self, request_id: RequestId, number: int) -> None:
        """It is taken away by command `number`: whatever comes, nothing of it is told."""
        self._close(request_id)
        self._last_drop = number

    def clear(self) -> None:
        self._entries.clear()
        self.num_sequences = 0

    def read(self, step: Step) -> StepOutput | None:
        """What is to be told of a step; None when nothing is left of it."""
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
        """The engine had not heard of all that was dropped."""
        named = {request_id for request_id, _ in (*output.deltas, *output.failed)}
        gone = {
            request_id
            for request_id in named.union(output.plain_ids)
            if (entry := self._entries.get(request_id)) is None or entry.since > num_seen
        }
        return without(output, gone) if gone else output

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
