"""Scheduler: turns requests into steps and sampled tokens into answers.

Owns the requests, their choices and the progress of each. Pure: `plan` builds a step (by the rules of
`step_planner`), the engine computes it, and `commit` applies the sampled tokens. Knows no model, memory,
clock or streams.

- All choices of a request but the first wait until the first has computed the prompt, and then find it
  cached.
- A block is named in `commit`, once it is full and computed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.delta import ChoiceEnd, FinishReason
from kvolt.core.errors import InvalidRequest, KvoltError, Overloaded
from kvolt.core.ids import BlockKey, RequestId
from kvolt.core.request import Request
from kvolt.kv import BlockId, BlockNames, BlockPool, Change
from kvolt.scheduler.check import check_scheduler
from kvolt.scheduler.holds import BlockHolds
from kvolt.scheduler.incoming_blocks import IncomingBlocks
from kvolt.scheduler.prefetched_blocks import PrefetchedBlocks
from kvolt.scheduler.sequence import ChoiceGroup, Naming, Phase, Sequence, TokenNaming
from kvolt.scheduler.step_plan import (
    Limits,
    NewToken,
    NewTokenRun,
    PlainBatch,
    Scheduling,
    StepPlan,
    Work,
    check_request,
    run_length,
)
from kvolt.scheduler.step_planner import StepPlanner

__all__ = ["Limits", "NewToken", "Scheduler", "StepPlan", "Work"]

_RUNNING = Phase.RUNNING  # local alias: enum member lookup is slow, and this is checked for every token


class Scheduler:
    """See the module. One plan is in flight at a time; all other methods may be called at any moment."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        card_eos: tuple[int, ...],
        keys: Callable[[Request], BlockKeyContext],
        scheduling: Scheduling = Scheduling.VLLM,
        naming: Callable[[Request], Naming] | None = None,
    ) -> None:
        """`naming` overrides how blocks of a request are named (default: by its tokens and `keys`); it needs
        no tokens."""
        self.pool = pool
        self.limits = limits
        self._eos = frozenset(card_eos)
        self._keys = keys
        self._naming = naming or self._name_by_tokens
        self.is_tokenless = naming is not None
        """Whether prompts have a length but no token ids."""
        self.prefetched = PrefetchedBlocks(pool)
        self.planner = StepPlanner(pool, self.prefetched, limits, scheduling)
        self.holds = BlockHolds(pool)
        self._groups: dict[RequestId, ChoiceGroup] = {}
        self._num_live = 0
        self._num_arrived = 0
        self._in_flight: StepPlan | None = None
        self.incoming = IncomingBlocks(
            self._groups, self.planner, self.holds, self.prefetched, self, limits.block_size
        )
        """Blocks filled by transfers."""

    @property
    def num_running(self) -> int:
        return len(self.planner.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running, including preempted ones."""
        return self._num_live - len(self.planner.running)

    @property
    def has_work(self) -> bool:
        return self._num_live > 0

    # --- requests

    def add_request(self, request: Request, *, keep_blocks: bool = False) -> None:
        """Enqueue a request. InvalidRequest if it can never run here, Overloaded if the queue is full.

        With `keep_blocks` the blocks of its first choice stay held after its end, until `release_kept`.
        Prefetched blocks (see `IncomingBlocks.commit`) stay held until the request is admitted, and are released if
        it is rejected.
        """
        try:
            self._add(request, keep_blocks)
        except BaseException:
            self.prefetched.release_expected(request.request_id)
            raise

    def _add(self, request: Request, keep_blocks: bool) -> None:
        self._check(request)
        naming = self._naming(request)
        first, *others = request.open_choices
        sequences = [self._sequence(request, first, naming)]
        tokens = sequences[0].tokens
        # Name all full blocks now, so that tokens that cannot be hashed fail here and not in a step.
        naming.reach(tokens, len(tokens) // self.limits.block_size)
        sequences += [self._sequence(request, index, self._naming(request)) for index in others]
        self._groups[request.request_id] = ChoiceGroup(sequences, sequences[1:], keep_blocks, sequences[0])
        self._num_live += len(sequences)
        self.planner.enqueue(sequences[0])
        self.incoming.hold_queued(sequences[0])

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request in any state; returns whether it was known. Its lent blocks stay held until
        `release_kept`; its prefetched blocks are released, even if the request itself has not arrived."""
        self.prefetched.release(request_id)
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        for sequence in group.live:
            if sequence not in group.held_back:
                self.planner.remove(sequence)
            if sequence.num_lent:
                self.holds.keep_orphaned(request_id, sequence.blocks[: sequence.num_lent])
            if sequence.blocks:
                self.holds.defer(sequence.blocks[sequence.num_lent :])
                sequence.blocks = []
            sequence.phase = Phase.DONE
        self._num_live -= len(group.live)
        self.release_deferred()
        return True

    def withdraw(self, request_id: RequestId) -> bool:
        """Drop a request that has not started; returns whether it was dropped."""
        group = self._groups.get(request_id)
        return group is not None and not group.has_started and self.abort(request_id)

    def requests(self) -> list[Request]:
        """All requests, running or waiting."""
        return [group.live[0].request for group in self._groups.values()]

    # --- steps

    def plan(self) -> StepPlan | None:
        """The next step, with its blocks allocated; None if nothing can run. Must be ended by `commit` or
        `discard`."""
        if self._in_flight is not None:
            raise KvoltError("a step is in flight: commit or discard it before the next")
        plan = self.planner.plan()
        if not plan.decodes and not plan.prefills:
            return None
        self._in_flight = plan
        return plan

    def commit(self, plan: StepPlan, sampled: Items[int], plain: PlainBatch | None = None) -> list[NewToken]:
        """Apply a computed step. `sampled` has one token per Work that samples: decodes first, then prefills.

        Sequences aborted during the step are skipped. If `plain` is given, it receives the tokens
        that need no further information, and these are left out of the result.
        """
        num_samples = len(plan.decodes) + sum(work.samples for work in plan.prefills)
        if len(sampled) != num_samples:
            raise KvoltError(f"{len(sampled)} tokens were sampled, but {num_samples} were planned")
        self._end_step(plan)
        block_size = self.limits.block_size
        new_tokens: list[NewToken] = []
        for work, token in zip(plan.decodes, sampled, strict=False):  # most steps consist only of this loop
            sequence = work.sequence
            if sequence.phase is not _RUNNING:
                continue
            num_computed = sequence.num_computed = work.start + 1
            if not num_computed % block_size:
                self.seal(sequence)
            known = sequence.tokens  # from here to `end`: `append_token` inlined
            known.append(token)
            may_end = token in sequence.ending_ids or len(known) >= sequence.max_length
            end = sequence.check_end(token) if may_end else None
            if end is not None:
                self._finish(sequence)
            elif plain is not None and sequence.is_plain:
                plain.ids.append(sequence.request.request_id)
                plain.tokens.append(token)
                continue
            new_tokens.append(NewToken(sequence, token, end, False))
        tokens = iter(sampled[len(plan.decodes) :])
        for work in plan.prefills:
            sequence = work.sequence
            sampled_token = next(tokens) if work.samples else None
            if sequence.phase is not _RUNNING:
                continue
            sequence.num_computed = work.start + work.num_tokens
            if sequence.received_span[1]:
                sequence.skip_received(block_size)
            if sequence.num_computed // block_size > sequence.num_sealed:
                self.seal(sequence)
            if sampled_token is not None:
                new_tokens.append(self._advance(sequence, sampled_token))
        return new_tokens

    def run_length(self, plan: StepPlan) -> int:
        """Number of consecutive steps equal to this one if no request arrives or ends. Waiting requests keep
        waiting: there was no room for the first, and there will be less."""
        return run_length(plan, self.limits.block_size, self.pool.num_free)

    def commit_run(
        self, plan: StepPlan, tokens_by_work: Items[Items[int]], on_computed: Callable[[Work], None]
    ) -> list[NewTokenRun]:
        """Apply several steps equal to `plan`: as many as each decode has tokens in `tokens_by_work`, at most
        `run_length`.

        `on_computed` is called for each sequence before its blocks are named or released.
        """
        self._end_step(plan)
        block_size = self.limits.block_size
        ran: list[NewTokenRun] = []
        for work, tokens in zip(plan.decodes, tokens_by_work, strict=True):
            sequence = work.sequence
            num_computed = work.start + len(tokens)
            num_more = -(-num_computed // block_size) - len(sequence.blocks)
            if sequence.phase is not _RUNNING or not self.planner.grow(sequence, num_more):
                continue
            sequence.tokens += tokens
            sequence.num_computed = num_computed
            on_computed(Work(sequence, work.start, len(tokens)))
            if num_computed // block_size > sequence.num_sealed:
                self.seal(sequence)
            is_over = len(sequence.tokens) >= sequence.max_length
            if is_over:
                self._finish(sequence)
            ran.append(NewTokenRun(sequence, tokens, ChoiceEnd(FinishReason.LENGTH) if is_over else None))
        return ran

    def _advance(self, sequence: Sequence, token: int) -> NewToken:
        """Append the first token after a completed prefill."""
        is_first = not sequence.has_output
        end = sequence.append_token(token)
        if is_first:
            self._queue_siblings(sequence)
        if end is not None:
            self._finish(sequence)
        elif is_first and not sequence.request.has_started:
            self.planner.advance_order(sequence)
        return NewToken(sequence, token, end, is_first)

    def discard(self, plan: StepPlan) -> None:
        """Drop a step that was not computed or failed; only its allocated blocks remain."""
        self._end_step(plan)

    # --- blocks

    def clear(self) -> int:
        """Drop all cached and prefetched blocks; running sequences keep theirs. Returns the number of names
        dropped."""
        self.prefetched.clear()
        self.holds.clear()
        return self.pool.clear()

    def take_changes(self) -> tuple[Change, ...]:
        return self.pool.take_changes()

    def lend_blocks(self, request_id: RequestId, after: int) -> tuple[list[BlockId], BlockNames] | None:
        """The complete full blocks of a prompt whose blocks are kept, once there are more than `after` or all
        of them; None before that. They stay in place until `release_kept`, even if the request ends.
        """
        kept = self.holds.find(request_id)
        if kept is not None:
            return kept
        group = self._groups.get(request_id)
        if group is None or group.first.num_sealed <= after:
            return None
        first = group.first
        first.num_lent = first.num_sealed
        return first.blocks, first.naming.names.slice(0, first.num_lent)

    def release_kept(self, request_id: RequestId) -> bool:
        """Returns whether anything was held."""
        was_held = self.holds.release_kept(request_id)
        self.release_deferred()
        return was_held

    def prompt_keys(self, request: Request) -> list[BlockKey]:
        """Keys of the full blocks of its prompt."""
        naming, tokens = self._naming(request), list(request.token_ids)
        naming.reach(tokens, len(tokens) // self.limits.block_size)
        return naming.names.keys

    def allocate(self, count: int) -> list[BlockId] | None:
        """Allocate blocks for something other than a request, to be released by the caller; None if there are
        too few."""
        return self.planner.allocate(count)

    # ---

    def _check(self, request: Request) -> None:
        check_request(request, self.limits, self.pool.num_blocks, self.is_tokenless)
        if request.request_id in self._groups or request.request_id in self.holds:
            raise InvalidRequest(f"request {request.request_id} is already known", param="request_id")
        if self.num_waiting >= self.limits.max_waiting:
            raise Overloaded("the engine's queue is full", queue="engine", limit=self.limits.max_waiting)

    def _sequence(self, request: Request, index: int, naming: Naming) -> Sequence:
        self._num_arrived += 1
        eos = frozenset() if request.stop.ignore_eos else self._eos
        order = (-request.routing.priority, self._num_arrived, self._num_arrived)
        sequence = Sequence(request, index, naming, eos, order=order)
        if request.has_started:
            sequence.advance_order()
        return sequence

    def _name_by_tokens(self, request: Request) -> Naming:
        return TokenNaming(request, self._keys(request))

    def _end_step(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise KvoltError("this step is not in flight")
        self._in_flight = None
        self.release_deferred()

    def end_in_flight(self, sequence: Sequence) -> int:
        """Number of its tokens computed once the step in flight has ended."""
        plan = self._in_flight
        for work in () if plan is None else plan.prefills:
            if work.sequence is sequence:
                return work.start + work.num_tokens
        return sequence.num_computed

    def release_deferred(self) -> None:
        """Release deferred blocks unless a step is in flight."""
        if self._in_flight is None:
            self.holds.release_deferred()

    def seal(self, sequence: Sequence) -> None:
        """Name the blocks that were filled since the last call."""
        num_full = sequence.num_computed // self.limits.block_size
        sequence.naming.reach(sequence.tokens, num_full)
        self.pool.register_run(sequence.blocks, sequence.naming.names, sequence.num_sealed, num_full)
        sequence.num_sealed = num_full

    def _queue_siblings(self, first: Sequence) -> None:
        group = self._groups[first.request.request_id]
        if first is not group.first:
            return
        for sequence in group.held_back:
            self.planner.enqueue(sequence)
        group.held_back.clear()

    def _finish(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        group = self._groups[request_id]
        self.planner.remove(sequence)
        sequence.phase = Phase.DONE
        if group.keeps_blocks and sequence is group.first:
            self.holds.keep(request_id, sequence.blocks, sequence.naming.names)
        else:
            self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        self._num_live -= 1
        group.live.remove(sequence)
        if not group.live:
            del self._groups[request_id]

    def check_integrity(self) -> None:
        """AssertionError with details if sequences and pool disagree."""
        check_scheduler(self.pool, self._groups, self.planner, self.holds, self.prefetched)
        assert self._in_flight or not self.holds.has_deferred, "blocks wait for a step that is not in flight"
        assert self._num_live == sum(len(group.live) for group in self._groups.values())
