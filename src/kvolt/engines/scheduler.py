"""Scheduler: which tokens of which sequences the next step computes, and in which blocks.

Owns the queue, the running batch and their blocks in the pool. Pure: a step is `plan`, then someone computes it,
then `commit` with the tokens sampled. Knows no model, no memory, no clock and no streams.

- Decodes always run, one token each. What is left of `max_batch_tokens` goes to prefills, in chunks, and then to
  new sequences. A sequence computes all its tokens but the one sampled last, so that a decode is nothing but the
  last chunk of a prefill. (With `Scheduling.SGLANG` prefills and new sequences get all of the step, and decodes run
  in steps that have neither. `max_num_seqs` and the blocks bound how long they wait.)
- Sequences go by priority, then by arrival, wherever one has to go before the other: waiting and running lists
  are sorted by it. The first that waits is admitted or none is: a large request does not starve behind small ones.
- A sequence is admitted when all its tokens have room, and a block is left for each that runs already: what was
  just admitted is then not thrown out again at the next block boundary. It starts behind the longest prefix of
  it that the pool holds, but its last token is always computed: that is where the next one comes from.
- When a decode finds no block, the last of the running ones is preempted. It lets go of its blocks and waits at
  its old place; later all its tokens are prefilled again, behind what the pool still holds of them. The first
  one never has to yield, and one alone fits the pool (`add` sees to it), so everything ends, unless others hold
  the blocks (see `holds`): then `plan` finds nothing to do until they are released.
- The choices of a request but the first wait until that one has its prompt computed, and then find it.
- A block gets its name in `commit`, when it is full and computed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.delta import FinishReason
from kvolt.core.errors import InvalidRequest, KvoltError, Overloaded
from kvolt.core.ids import RequestId
from kvolt.core.load import StepStats
from kvolt.core.request import Request
from kvolt.engines.holds import Holds
from kvolt.engines.scheduler_check import check_books
from kvolt.engines.sequence import BlockNames, End, Names, Phase, Sequence
from kvolt.engines.step_plan import (
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
from kvolt.kv import BlockId, BlockName, BlockPool, Change

__all__ = ["Advanced", "Limits", "Scheduler", "StepPlan", "Work"]

_order = attrgetter("order")
_RUNNING = Phase.RUNNING  # once: members of an enum are slow to look up, and this is asked for each token


@dataclass(slots=True, eq=False)
class _Group:
    """The choices of one request that have not ended."""

    live: list[Sequence]
    held_back: list[Sequence]
    """Those of them that wait for the first one's prompt and are in no queue."""
    keeps_blocks: bool
    has_started: bool = False


class Scheduler:
    """See the module. One plan at a time is under way; all else may be called at any moment."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        card_eos: tuple[int, ...],
        keys: Callable[[Request], BlockKeyContext],
        scheduling: Scheduling = Scheduling.VLLM,
        names: Callable[[Request], Names] | None = None,
    ) -> None:
        """`names`: another way to name the blocks of a request than by its tokens and `keys`."""
        self.pool = pool
        self.limits = limits
        self.num_preemptions = 0
        self._eos = frozenset(card_eos)
        self._keys = keys
        self._names = names or self._named_by_tokens
        self._prompts_first = scheduling is Scheduling.SGLANG
        self._holds = Holds(pool)
        self._groups: dict[RequestId, _Group] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._num_live = 0
        self._num_arrived = 0
        self._in_flight: StepPlan | None = None
        self._deferred: list[list[BlockId]] = []  # of aborted sequences; the step under way may write to them

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run, those preempted among them."""
        return self._num_live - len(self._running)

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_used

    @property
    def has_work(self) -> bool:
        return self._num_live > 0

    # --- requests

    def add(self, request: Request, *, keep_blocks: bool = False) -> None:
        """Take a request. InvalidRequest when it can never run here, Overloaded when too many wait.

        With `keep_blocks` those of its first choice stay held when that ends, until `release_kept`.
        """
        self._check(request)
        names = self._names(request)
        sequences = [self._sequence(request, 0, names)]
        tokens = sequences[0].tokens
        # All names that it can have now: what cannot be hashed is to fail here, and not in a step.
        names.reach(tokens, len(tokens) // self.limits.block_size)
        sequences += [
            self._sequence(request, index, self._names(request))
            for index in range(1, request.sampling.num_choices)
        ]
        self._groups[request.request_id] = _Group(sequences, sequences[1:], keep_blocks)
        self._num_live += len(sequences)
        insort(self._waiting, sequences[0], key=_order)

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request wherever it is; whether it was here."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        for sequence in group.live:
            if sequence.phase is Phase.RUNNING:
                _remove(self._running, sequence)
                self._deferred.append(sequence.blocks)
                sequence.blocks = []
            elif sequence not in group.held_back:
                _remove(self._waiting, sequence)
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
        plan = self._plan_apart() if self._prompts_first else self._plan_mixed()
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
            if sequence.phase is not _RUNNING or not all(self._grow(sequence) for _ in range(num_more)):
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
        if is_first and not sequence.index:
            self._let_in_siblings(sequence)
        if end is not None:
            self._finish(sequence)
        return Advanced(sequence, token, end, is_first)

    def discard(self, plan: StepPlan) -> None:
        """The step was not computed, or failed: as if it had not been planned, but for the blocks it got."""
        self._land(plan)

    # --- blocks

    def clear(self) -> int:
        """Forget what is cached; running sequences keep their blocks. How many names were forgotten."""
        return self.pool.clear()

    def take_changes(self) -> tuple[Change, ...]:
        return self.pool.take_changes()

    def kept(self, request_id: RequestId) -> tuple[list[BlockId], list[BlockName]] | None:
        return self._holds.kept(request_id)

    def release_kept(self, request_id: RequestId) -> bool:
        return self._holds.release_kept(request_id)

    def adopt(self, names: Items[BlockName]) -> list[tuple[int, BlockId]]:
        return self._holds.adopt(names)

    def seal_adopted(self, adopted: Items[tuple[int, BlockId]], num_filled: int | None = None) -> None:
        self._holds.seal_adopted(adopted, num_filled)

    # ---

    def _check(self, request: Request) -> None:
        check_request(request, self.limits, self.pool.num_blocks)
        if request.request_id in self._groups or request.request_id in self._holds:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        if self.num_waiting >= self.limits.max_waiting:
            raise Overloaded("the engine's queue is full", queue="engine", limit=self.limits.max_waiting)

    def _sequence(self, request: Request, index: int, names: Names) -> Sequence:
        self._num_arrived += 1
        eos = frozenset() if request.stop.ignore_eos else self._eos
        return Sequence(request, index, names, eos, order=(-request.routing.priority, self._num_arrived))

    def _named_by_tokens(self, request: Request) -> Names:
        return BlockNames(request, self._keys(request))

    def _plan_mixed(self) -> StepPlan:
        decodes, prefilling, context_tokens = self._plan_decodes()
        budget = self.limits.max_batch_tokens - len(decodes)
        prefills, num_tokens, prefill_context = self._plan_prefills(prefilling, budget)
        stats = StepStats(len(decodes), num_tokens, prefill_context, context_tokens)
        return StepPlan(decodes, prefills, stats)

    def _plan_apart(self) -> StepPlan:
        plan = self._plan_prompts()
        if plan.prefills:
            return plan
        decodes, _, context_tokens = self._plan_decodes()
        if decodes:
            return StepPlan(decodes, [], StepStats(len(decodes), 0, 0, context_tokens))
        return self._plan_prompts()  # nobody, or one that yielded: what it let go may be room for another

    def _plan_prompts(self) -> StepPlan:
        prefilling = [one for one in self._running if one.num_computed < one.num_to_prefill]
        prefills, num_tokens, prefill_context = self._plan_prefills(prefilling, self.limits.max_batch_tokens)
        return StepPlan([], prefills, StepStats(0, num_tokens, prefill_context))

    def _plan_decodes(self) -> tuple[list[Work], list[Sequence], int]:
        """The decodes, each with a block for its token; who prefills; how much KV the decodes read.

        A victim is the last of the running ones, so it was not looked at yet or is the one in need itself.
        """
        decodes: list[Work] = []
        prefilling: list[Sequence] = []
        context_tokens = 0
        block_size = self.limits.block_size
        for sequence in self._running:  # which may lose its end meanwhile: that ends the loop earlier
            start = sequence.num_computed
            if start < sequence.num_to_prefill:
                prefilling.append(sequence)
                continue
            if start >= len(sequence.blocks) * block_size and not self._grow(sequence):
                break
            decodes.append(Work(sequence, start, 1))
            context_tokens += start + 1
        return decodes, prefilling, context_tokens

    def _plan_prefills(self, prefilling: list[Sequence], budget: int) -> tuple[list[Work], int, int]:
        """Chunks of those that prefill, then of new ones; their tokens, and their part in StepStats.prefill_context."""
        prefills: list[Work] = []
        num_tokens = prefill_context = 0
        for sequence in chain(prefilling, self._admissions()):
            start = sequence.num_computed
            chunk = min(sequence.num_to_prefill - start, budget - num_tokens)
            num_tokens += chunk
            prefill_context += chunk * (start + chunk)
            prefills.append(Work(sequence, start, chunk))
            if num_tokens == budget:
                break
        return prefills, num_tokens, prefill_context

    def _grow(self, sequence: Sequence) -> bool:
        """One block more, at the cost of others if need be; False when it had to yield itself."""
        while (blocks := self.pool.allocate(1)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += blocks
        return True

    def _preempt(self, sequence: Sequence) -> None:
        _remove(self._running, sequence)
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_computed = sequence.num_sealed = sequence.num_to_prefill = 0
        sequence.phase = Phase.WAITING
        insort(self._waiting, sequence, key=_order)
        self.num_preemptions += 1

    def _admissions(self) -> Iterator[Sequence]:
        """Sequences as they are admitted, for as long as there is a place, room and someone who asks for more."""
        while self._waiting and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            if not self._find_blocks(sequence):
                return
            del self._waiting[0]
            insort(self._running, sequence, key=_order)
            sequence.phase = Phase.RUNNING
            self._groups[sequence.request.request_id].has_started = True
            yield sequence

    def _find_blocks(self, sequence: Sequence) -> bool:
        """Cached and fresh blocks for all tokens of a sequence, or none."""
        block_size = self.limits.block_size
        length = len(sequence.tokens)
        num_blocks = -(-length // block_size)
        num_wanted = num_blocks + len(self._running)
        keys = []
        if not sequence.needs_prompt_logits:
            num_reusable = (length - 1) // block_size
            sequence.names.reach(sequence.tokens, num_reusable)
            keys = sequence.names.keys[:num_reusable]
        if num_wanted - self.pool.match(keys) > self.pool.num_free:
            return False  # at a long queue's head this is the usual end: nothing was touched for it
        found = self.pool.acquire(keys)
        fresh = None
        # Again, since fewer are free than before: some of those found were inactive.
        if num_wanted - len(found) <= self.pool.num_free:
            fresh = self.pool.allocate(num_blocks - len(found))
        if fresh is None:
            self.pool.release(reversed(found))
            return False
        sequence.blocks = found + fresh
        sequence.num_computed = len(found) * block_size
        sequence.num_sealed = len(found)
        sequence.num_to_prefill = length
        if sequence.num_cached is None:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        return True

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
        blocks, names = sequence.blocks, sequence.names
        names.reach(sequence.tokens, num_full)
        self.pool.register_run(blocks, names.names, sequence.num_sealed, num_full)
        sequence.num_sealed = num_full

    def _let_in_siblings(self, first: Sequence) -> None:
        group = self._groups[first.request.request_id]
        for sequence in group.held_back:
            insort(self._waiting, sequence, key=_order)
        group.held_back.clear()

    def _finish(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        group = self._groups[request_id]
        _remove(self._running, sequence)
        sequence.phase = Phase.DONE
        if group.keeps_blocks and not sequence.index:
            self._holds.keep(request_id, sequence.blocks, sequence.names.names)
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


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    del queue[bisect_left(queue, sequence.order, key=_order)]
