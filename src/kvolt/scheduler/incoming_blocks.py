"""IncomingBlocks: blocks that transfers fill while requests wait or compute their prompts. Pure.

An allocation of `BlockHolds.allocate_incoming` ends with `commit`: its filled blocks are cached, and may stay held for
one request. While that request computes its prompt, `attach` gives it filled blocks that it has not reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from math import inf
from typing import Protocol

from kvolt.core.ids import RequestId
from kvolt.kv import BlockId
from kvolt.scheduler.holds import BlockHolds
from kvolt.scheduler.prefetched_blocks import PrefetchedBlocks
from kvolt.scheduler.sequence import ChoiceGroup, Phase, Sequence
from kvolt.scheduler.step_planner import StepPlanner


class SequenceSteps(Protocol):
    """The steps of a scheduler, as attaching blocks needs them."""

    def end_in_flight(self, sequence: Sequence) -> int:
        """Number of its tokens computed once the step in flight has ended."""
        ...

    def release_deferred(self) -> None:
        """Release deferred blocks unless a step is in flight."""
        ...

    def seal(self, sequence: Sequence) -> None:
        """Name the blocks that were filled since the last call."""
        ...


class IncomingBlocks:
    """See the module."""

    def __init__(
        self,
        groups: Mapping[RequestId, ChoiceGroup],
        planner: StepPlanner,
        holds: BlockHolds,
        prefetched: PrefetchedBlocks,
        steps: SequenceSteps,
        block_size: int,
    ) -> None:
        self._groups = groups
        self._planner = planner
        self._holds = holds
        self._prefetched = prefetched
        self._steps = steps
        self._block_size = block_size

    def commit(
        self,
        incoming: Items[tuple[int, BlockId]],
        num_filled: int | None = None,
        keep_for: RequestId | None = None,
        expires_at: float = inf,
    ) -> None:
        """As `BlockHolds.commit_incoming`. With `keep_for` the blocks up to the last filled one, including
        those present before, stay held for that request until it is admitted or aborted,
        `PrefetchedBlocks.release_expected`, or `PrefetchedBlocks.expire` if it has not arrived by `expires_at`.
        Allocations may take them earlier."""
        keys = self._holds.commit_incoming(incoming, num_filled)
        if keep_for is None:
            return
        group = self._groups.get(keep_for)
        if group is None:
            self._prefetched.hold_expected(keep_for, keys, expires_at)
        elif not group.has_started:
            self._prefetched.hold_expected(keep_for, keys, expires_at)
            self.hold_queued(group.first)

    def hold_queued(self, first: Sequence) -> None:
        """Keep prefetched blocks of a request while its first choice waits."""
        request_id = first.request.request_id
        if self._prefetched.is_expected(request_id):
            self._prefetched.hold_queued(request_id, self._planner.reusable_keys(first), first.order)

    def attach(
        self, incoming: Items[tuple[int, BlockId]], num_last: int, request_id: RequestId
    ) -> tuple[int, int] | None:
        """Attach the last `num_last` blocks of an allocation, which are filled, to a request that computes
        its prompt; it uses those that it has not reached. Returns the number attached, and the number of
        blocks reached including the step in flight (all if the request can use none). None if the request is
        unknown."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        first, end = group.first, incoming[-1][0] + 1
        if first.phase is Phase.WAITING:
            # A request must not wait for blocks reserved for itself, with the whole queue behind it.
            return 0, end if self._planner.is_starved(first) else 0
        is_computed = first.phase is Phase.DONE or first.num_computed >= first.num_to_prefill
        if is_computed or first.needs_prompt_logits:
            return 0, end
        num_reached = -(-self._steps.end_in_flight(first) // self._block_size)
        end, attached = self._holds.attach_last(
            incoming, max(end - num_last, num_reached), self._planner.reusable_keys(first)
        )
        if attached:
            self._use_attached(first, end, attached, num_reached)
        return len(attached), num_reached

    def _use_attached(self, first: Sequence, end: int, attached: list[BlockId], num_reached: int) -> None:
        """Replace the sequence's own blocks before `end` by attached ones."""
        start = end - len(attached)
        own, first.blocks[start:end] = first.blocks[start:end], attached
        self._holds.defer(own)
        self._steps.release_deferred()
        follows = first.received_span[0] == end
        first.received_span = (start, first.received_span[1] if follows else end)
        if num_reached * self._block_size == first.num_computed:
            first.skip_received(self._block_size)
            self._steps.seal(first)
