"""Scheduler: requests become steps, and steps become answers.

Owns the requests, their choices and how far each is. Pure: a step is `plan` (by the rules of `step_planner`), then
someone computes it, then `commit` with the tokens sampled. Knows no model, no memory, no clock and no streams.

- The choices of a request but the first wait until that one has its prompt computed, and then find it.
- A block gets its name in `commit`, when it is full and computed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.delta import FinishReason
from kvolt.core.ending import End
from kvolt.core.errors import InvalidRequest, KvoltError, Overloaded
from kvolt.core.ids import BlockKey, RequestId
from kvolt.core.request import Request
from kvolt.kv import BlockId, BlockPool, Change, Names, SealedLog
from kvolt.scheduler.arrivals import Arrivals
from kvolt.scheduler.check import check_books
from kvolt.scheduler.holds import Holds
from kvolt.scheduler.sequence import Naming, Phase, Sequence, TokenNaming
from kvolt.scheduler.step_pace import StepPace
from kvolt.scheduler.step_plan import (
    Advanced,
    Limits,
    PlainBatch,
    Ran,
    Scheduling,
    StepPlan,
    Work,
    check_request,
    run_length,
)
from kvolt.scheduler.step_planner import StepPlanner

__all__ = ["Advanced", "Limits", "Scheduler", "StepPlan", "Work"]

_RUNNING = Phase.RUNNING  # once: members of an enum are slow to look up, and this is asked for each token


@dataclass(slots=True, eq=False)
class _Group:
    """The choices of one request that have not ended."""

    live: list[Sequence]
    held_back: list[Sequence]
    """Those of them that wait for the first one's prompt and are in no queue."""
    keeps_blocks: bool
    first: Sequence
    """The one that the others wait for, also when it has ended."""

    @property
    def has_started(self) -> bool:
        return self.first.num_cached is not None


class Scheduler:
    """See the module. One plan at a time is under way; all else may be called at any moment."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        card_eos: tuple[int, ...],
        keys: Callable[[Request], BlockKeyContext],
        scheduling: Scheduling = Scheduling.VLLM,
        naming: Callable[[Request], Naming] | None = None,
    ) -> None:
        """`naming`: another way to name the blocks of a request than by its tokens and `keys`: it need have none."""
        self.pool = pool
        self.limits = limits
        self._eos = frozenset(card_eos)
        self._keys = keys
        self._naming = naming or self._by_tokens
        self.is_on_paper = naming is not None
        """Whether prompts have a length and no tokens."""
        self._arrivals = Arrivals(pool)
        self._planner = StepPlanner(pool, self._arrivals, limits, scheduling)
        self._holds = Holds(pool)
        self._groups: dict[RequestId, _Group] = {}
        self._num_live = 0
        self._num_arrived = 0
        self._in_flight: StepPlan | None = None
        self._deferred: list[list[BlockId]] = []  # of aborted sequences; the step under way may use them

    @property
    def num_running(self) -> int:
        return len(self._planner.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run, those preempted among them."""
        return self._num_live - len(self._planner.running)

    @property
    def num_preemptions(self) -> int:
        return self._planner.num_preemptions

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_used

    @property
    def has_work(self) -> bool:
        return self._num_live > 0

    @property
    def pace(self) -> StepPace | None:
        """Predicted step times, by which prompts are cut; None where they are unknown."""
        return self._planner.pace

    @pace.setter
    def pace(self, pace: StepPace | None) -> None:
        self._planner.pace = pace

    # --- requests

    def add(self, request: Request, *, keep_blocks: bool = False) -> None:
        """Take a request. InvalidRequest when it can never run here, Overloaded when too many wait.

        With `keep_blocks` those of its first choice stay held when that ends, until `release_kept`. What was kept for
        it (see `seal_adopted`) stays until it is admitted, or is let go where it is refused.
        """
        try:
            self._add(request, keep_blocks)
        except BaseException:
            self._arrivals.cancel(request.request_id)
            raise

    def _add(self, request: Request, keep_blocks: bool) -> None:
        self._check(request)
        naming = self._naming(request)
        first, *others = request.open_choices
        sequences = [self._sequence(request, first, naming)]
        tokens = sequences[0].tokens
        # All names that it can have now: what cannot be hashed is to fail here, and not in a step.
        naming.reach(tokens, len(tokens) // self.limits.block_size)
        sequences += [self._sequence(request, index, self._naming(request)) for index in others]
        self._groups[request.request_id] = _Group(sequences, sequences[1:], keep_blocks, sequences[0])
        self._num_live += len(sequences)
        self._planner.wait(sequences[0])
        self._queue_arrivals(sequences[0])

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request wherever it is; whether it was here. What it lends is held until `release_kept`; what was
        kept for it is let go, also where it has not come."""
        self._arrivals.let_go(request_id)
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        for sequence in group.live:
            if sequence not in group.held_back:
                self._planner.leave(sequence)
            if sequence.num_lent:
                self._holds.leave(request_id, sequence.blocks[: sequence.num_lent])
            if sequence.blocks:
                self._deferred.append(sequence.blocks[sequence.num_lent :])
                sequence.blocks = []
            sequence.phase = Phase.DONE
        self._num_live -= len(group.live)
        if self._in_flight is None:
            self._release_deferred()
        return True

    def withdraw(self, request_id: RequestId) -> bool:
        """Give a request back if nothing of it has started; whether that was so."""
        group = self._groups.get(request_id)
        return group is not None and not group.has_started and self.abort(request_id)

    def requests(self) -> list[Request]:
        """Those that are here, running or waiting."""
        return [group.live[0].request for group in self._groups.values()]

    # --- steps

    def plan(self) -> StepPlan | None:
        """The next step, its blocks allocated; None when nothing can run. Ends with `commit` or `discard`."""
        if self._in_flight is not None:
            raise KvoltError("a step is under way: commit or discard it before the next")
        plan = self._planner.plan()
        if not plan.decodes and not plan.prefills:
            return None
        self._in_flight = plan
        return plan

    def commit(self, plan: StepPlan, sampled: Items[int], plain: PlainBatch | None = None) -> list[Advanced]:
        """The step was computed. `sampled` has a token for each Work that samples, decodes then prefills.

        Sequences that were aborted meanwhile are passed over. Where a token is all there is to tell it goes to
        `plain`, if that is given, and is not in the answer.
        """
        num_samples = len(plan.decodes) + sum(work.samples for work in plan.prefills)
        if len(sampled) != num_samples:
            raise KvoltError(f"{len(sampled)} tokens were sampled where {num_samples} were planned")
        self._land(plan)
        block_size = self.limits.block_size
        advanced: list[Advanced] = []
        for work, token in zip(plan.decodes, sampled, strict=False):  # most steps are nothing but this loop
            sequence = work.sequence
            if sequence.phase is not _RUNNING:
                continue
            num_computed = sequence.num_computed = work.start + 1
            if not num_computed % block_size:
                self._seal(sequence)
            known = sequence.tokens  # from here to `end` it is `push`, less the call
            known.append(token)
            may_end = token in sequence.enders or len(known) >= sequence.max_length
            end = sequence.end_by(token) if may_end else None
            if end is not None:
                self._finish(sequence)
            elif plain is not None and sequence.is_plain:
                plain.ids.append(sequence.request.request_id)
                plain.tokens.append(token)
                continue
            advanced.append(Advanced(sequence, token, end, False))
        tokens = iter(sampled[len(plan.decodes) :])
        for work in plan.prefills:
            sequence = work.sequence
            sampled_token = next(tokens) if work.samples else None
            if sequence.phase is not _RUNNING:
                continue
            sequence.num_computed = work.start + work.num_tokens
            if sequence.ahead[1]:
                sequence.pass_over(block_size)
            if sequence.num_computed // block_size > sequence.num_sealed:
                self._seal(sequence)
            if sampled_token is not None:
                advanced.append(self._advance(sequence, sampled_token))
        return advanced

    def run_length(self, plan: StepPlan) -> int:
        """How many steps are like this one, if nothing comes and nobody leaves.

        Whoever waits goes on waiting meanwhile: there was no room for the first, and there will be less.
        """
        return run_length(plan, self.limits.block_size, self.pool.num_free)

    def commit_run(
        self, plan: StepPlan, said: Items[Items[int]], on_computed: Callable[[Work], None]
    ) -> list[Ran]:
        """As many steps like this one were computed as each of its decodes has tokens in `said`, at most `run_length`.

        `on_computed` is told what of each sequence was computed, before its blocks are named or let go.
        """
        self._land(plan)
        block_size = self.limits.block_size
        ran: list[Ran] = []
        for work, tokens in zip(plan.decodes, said, strict=True):
            sequence = work.sequence
            num_computed = work.start + len(tokens)
            num_more = -(-num_computed // block_size) - len(sequence.blocks)
            if sequence.phase is not _RUNNING or not self._planner.grow(sequence, num_more):
                continue
            sequence.tokens += tokens
            sequence.num_computed = num_computed
            on_computed(Work(sequence, work.start, len(tokens)))
            if num_computed // block_size > sequence.num_sealed:
                self._seal(sequence)
            is_over = len(sequence.tokens) >= sequence.max_length
            if is_over:
                self._finish(sequence)
            ran.append(Ran(sequence, tokens, End(FinishReason.LENGTH) if is_over else None))
        return ran

    def _advance(self, sequence: Sequence, token: int) -> Advanced:
        """All tokens of a prefill are computed, and here is the next."""
        is_first = not sequence.has_spoken
        end = sequence.push(token)
        if is_first:
            self._let_in_siblings(sequence)
        if end is not None:
            self._finish(sequence)
        elif is_first and not sequence.request.has_begun:
            self._planner.go_ahead(sequence)
        return Advanced(sequence, token, end, is_first)

    def discard(self, plan: StepPlan) -> None:
        """The step was not computed, or failed: as if it had not been planned, but for the blocks it got."""
        self._land(plan)

    # --- blocks

    def clear(self) -> int:
        """Forget what is cached, or kept for who waits; running sequences keep their blocks. How many names were
        forgotten."""
        self._arrivals.clear()
        self._holds.clear()
        return self.pool.clear()

    def take_changes(self) -> tuple[Change, ...]:
        return self.pool.take_changes()

    def kept(self, request_id: RequestId) -> tuple[list[BlockId], Names] | None:
        return self._holds.kept(request_id)

    def lend(self, request_id: RequestId, after: int) -> tuple[list[BlockId], Names] | None:
        """The complete full blocks of a prompt whose blocks are kept: once there are more than `after` or all are
        there, None before that. They stay where they are until `release_kept`, whatever becomes of the request."""
        kept = self._holds.kept(request_id)
        if kept is not None:
            return kept
        group = self._groups.get(request_id)
        if group is None or group.first.num_sealed <= after:
            return None
        first = group.first
        first.num_lent = first.num_sealed
        return first.blocks, first.naming.names.part(0, first.num_lent)

    def forsake_kept(self, request_id: RequestId) -> None:
        """Nobody finds what is kept of a request any more, but it stays where it is until `release_kept`."""
        self._holds.forsake(request_id)

    def release_kept(self, request_id: RequestId) -> bool:
        """Whether there was anything."""
        left = self._holds.take_left(request_id)
        if left:
            self._deferred.append(left)
            if self._in_flight is None:
                self._release_deferred()
        return self._holds.release_kept(request_id) or bool(left)

    def pin_sealed(self, name: RequestId, most_blocks: int) -> list[tuple[list[BlockId], Names, int]]:
        """Of blocks that were named since the last time, and are still here: the chain that each run of them ends, and
        its place in it. They stay where they are until `release_kept`; what would take more than `most_blocks` of those
        that nobody holds, which is not much while requests run, comes next time. The first time there are none: it is
        only then that somebody wants to know."""
        if self.pool.sealed is None:
            self.pool.sealed = SealedLog(self.pool.num_blocks)
        found: list[tuple[list[BlockId], Names, int]] = []
        fewest_free = self.pool.num_free - most_blocks
        while self.pool.sealed and self.pool.num_free > fewest_free:
            tip, first = self.pool.sealed.pop()
            blocks, names = self._holds.pin(name, tip)
            if len(blocks) > first:
                found.append((blocks, names, first))
        return found

    def adopt(self, names: Names) -> list[tuple[int, BlockId]]:
        return self._holds.adopt(names)

    def prompt_keys(self, request: Request) -> list[BlockKey]:
        """Of the full blocks of its prompt, as they will be named when it is here."""
        naming, tokens = self._naming(request), list(request.token_ids)
        naming.reach(tokens, len(tokens) // self.limits.block_size)
        return naming.names.keys

    def seal_adopted(
        self,
        adopted: Items[tuple[int, BlockId]],
        num_filled: int | None = None,
        keep_for: RequestId | None = None,
        expires_at: float = inf,
    ) -> None:
        """As `Holds.seal_adopted`. With `keep_for` the blocks up to the last that is filled, those that were here
        already among them, stay for a request: until it is admitted or aborted, `cancel_arrivals`, or `expire_arrivals`
        where it is not here at `expires_at`. Others in need of blocks may have them before."""
        keys = self._holds.seal_adopted(adopted, num_filled)
        if keep_for is None:
            return
        group = self._groups.get(keep_for)
        if group is None:
            self._arrivals.expect(keep_for, keys, expires_at)
        elif not group.has_started:
            self._arrivals.expect(keep_for, keys, expires_at)
            self._queue_arrivals(group.first)

    def take_adopted(
        self, adopted: Items[tuple[int, BlockId]], num_last: int, request_id: RequestId
    ) -> tuple[int, int] | None:
        """The last `num_last` of an `adopt` are filled; a request that computes its prompt takes those that it has not
        reached. How many it took, and how many blocks it has reached, the step under way included, or all where it has
        no use for any; None where it is not here."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        first, end = group.first, adopted[-1][0] + 1
        if first.phase is Phase.WAITING:
            # It is not to wait for blocks that are kept for itself, and all others behind it.
            return 0, end if self._planner.is_starved(first) else 0
        is_computed = first.phase is Phase.DONE or first.num_computed >= first.num_to_prefill
        if is_computed or first.needs_prompt_logits:
            return 0, end
        num_reached = -(-self._end_under_way(first) // self.limits.block_size)
        end, taken = self._holds.take_last(
            adopted,
            max(end - num_last, num_reached),
            self._planner.reusable_keys(first),
        )
        if taken:
            start = end - len(taken)
            own, first.blocks[start:end] = first.blocks[start:end], taken
            self._deferred.append(own)
            if self._in_flight is None:
                self._release_deferred()
            follows = first.ahead[0] == end
            first.ahead = (start, first.ahead[1] if follows else end)
            if num_reached * self.limits.block_size == first.num_computed:
                first.pass_over(self.limits.block_size)
                self._seal(first)
        return len(taken), num_reached

    def _end_under_way(self, sequence: Sequence) -> int:
        """Of its tokens, those that are computed when the step under way is over."""
        plan = self._in_flight
        for work in () if plan is None else plan.prefills:
            if work.sequence is sequence:
                return work.start + work.num_tokens
        return sequence.num_computed

    def cancel_arrivals(self, request_id: RequestId) -> None:
        """A request will not come: what is kept for it is let go. Not what is kept for one that is here."""
        self._arrivals.cancel(request_id)

    def expire_arrivals(self, now: float) -> None:
        self._arrivals.expire(now)

    @property
    def next_expiry(self) -> float | None:
        """When the next of the requests for which something is kept should have come."""
        return self._arrivals.next_expiry

    def allocate(self, count: int) -> list[BlockId] | None:
        """Blocks for something else than a request, the caller's to release; None where there are not so many."""
        return self._planner.allocate(count)

    # ---

    def _check(self, request: Request) -> None:
        check_request(request, self.limits, self.pool.num_blocks, self.is_on_paper)
        if request.request_id in self._groups or request.request_id in self._holds:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        if self.num_waiting >= self.limits.max_waiting:
            raise Overloaded("the engine's queue is full", queue="engine", limit=self.limits.max_waiting)

    def _sequence(self, request: Request, index: int, naming: Naming) -> Sequence:
        self._num_arrived += 1
        eos = frozenset() if request.stop.ignore_eos else self._eos
        order = (-request.routing.priority, self._num_arrived, self._num_arrived)
        sequence = Sequence(request, index, naming, eos, order=order)
        if request.has_begun:
            sequence.go_ahead()
        return sequence

    def _by_tokens(self, request: Request) -> Naming:
        return TokenNaming(request, self._keys(request))

    def _queue_arrivals(self, first: Sequence) -> None:
        """What was kept for a request, if anything was, stays for as long as its first choice waits."""
        request_id = first.request.request_id
        if self._arrivals.expects(request_id):
            self._arrivals.queue(request_id, self._planner.reusable_keys(first), first.order)

    def _land(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise KvoltError("this step is not under way")
        self._in_flight = None
        self._release_deferred()

    def _release_deferred(self) -> None:
        for blocks in self._deferred:
            self.pool.release(reversed(blocks))
        self._deferred.clear()

    def _seal(self, sequence: Sequence) -> None:
        """Name the blocks that are full and computed since the last time."""
        num_full = sequence.num_computed // self.limits.block_size
        sequence.naming.reach(sequence.tokens, num_full)
        self.pool.register_run(sequence.blocks, sequence.naming.names, sequence.num_sealed, num_full)
        sequence.num_sealed = num_full

    def _let_in_siblings(self, first: Sequence) -> None:
        group = self._groups[first.request.request_id]
        if first is not group.first:
            return
        for sequence in group.held_back:
            self._planner.wait(sequence)
        group.held_back.clear()

    def _finish(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        group = self._groups[request_id]
        self._planner.leave(sequence)
        sequence.phase = Phase.DONE
        if group.keeps_blocks and sequence is group.first:
            self._holds.keep(request_id, sequence.blocks, sequence.naming.names)
        else:
            self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        self._num_live -= 1
        group.live.remove(sequence)
        if not group.live:
            del self._groups[request_id]

    def check_integrity(self) -> None:
        """AssertionError, with the story, where sequences and pool do not agree."""
        check_books(self)
