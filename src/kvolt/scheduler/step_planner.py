"""StepPlanner: chooses which sequences run, what the next step computes of each, and in which blocks.

Owns the two lists, and gives and takes the blocks of who runs. Knows no requests and nothing of what comes out of a
step: that is `scheduler`'s, whose rules these are.

- Decodes always run, one token each. What is left of `max_batch_tokens` goes to prefills, in chunks, and then to
  new sequences. A sequence computes all its tokens but the one sampled last, so that a decode is nothing but the
  last chunk of a prefill. (With `Scheduling.SGLANG` prefills and new sequences get all of the step, and decodes run
  in steps that have neither. `max_num_seqs` and the blocks bound how long they wait.)
- Where step times are known (`pace`), a chunk ends at the last block boundary whose step is predicted to take no longer
  than `StepPace.limit_s`. The first prompt of a step gets a block in any case, so that every prompt ends.
- Where the first prompt is cut that way, later ones of which all that is left takes half of the step's time at most go
  before it: a short prompt, or the last tokens of one whose KV came from elsewhere, need not wait for a long one. The
  first gets the other half. No block that the first that waits needs is given to a later one.
- Sequences go by priority, then by arrival, wherever one has to go before the other: waiting and running lists are
  sorted by it. One whose client has tokens already (it sampled here, or came with a handoff or a migration) goes before
  prompts that came up to `HEAD_START` requests earlier; no more, so that handoffs do not starve prompts. The first that
  waits is admitted or none is: a large request does not starve behind small ones.
- A sequence is admitted when all its tokens have room, and a block is left for each that runs already: what was
  just admitted is then not thrown out again at the next block boundary. It starts behind the longest prefix of
  it that the pool holds, but its last token is always computed: that is where the next one comes from.
- When a decode finds no block, the last of the running ones is preempted. It lets go of its blocks and waits at
  its old place; later all its tokens are prefilled again, behind what the pool still holds of them. The first
  one never has to yield, and one alone fits the pool (who adds it sees to that), so everything ends, unless others
  hold the blocks (see `holds`): then there is nothing to plan until they are released.
- What is kept for those that wait (see `arrivals`) stays for as long as nobody is in need of it: before one is
  preempted, and before the first that waits goes on waiting, it is given up, that of the last in the queue first.
- Who lends blocks is not preempted: somebody reads them. That is a prompt which is computed for others and says one
  token. It got all its blocks when it was admitted and needs no more, so it ends, even if all others have to yield.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import chain
from math import inf
from operator import attrgetter

from kvolt.core.ids import BlockKey
from kvolt.core.latency import StepModel
from kvolt.core.load import StepStats
from kvolt.kv import BlockId, BlockPool
from kvolt.scheduler.arrivals import Arrivals
from kvolt.scheduler.sequence import Phase, Sequence
from kvolt.scheduler.shared_reads import SharedReads
from kvolt.scheduler.step_pace import StepPace
from kvolt.scheduler.step_plan import Limits, Scheduling, StepPlan, Work, meeting_tokens, with_chunk

_order = attrgetter("order")
_LOOK_AHEAD = 16
"""Of those that wait, which may go before the first: the others would be looked at in every step."""


class StepPlanner:
    """See the module."""

    def __init__(self, pool: BlockPool, arrivals: Arrivals, limits: Limits, scheduling: Scheduling) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.pace: StepPace | None = None
        """Predicted step times; None where they are unknown, and only tokens limit a step."""
        self._pool = pool
        self._arrivals = arrivals
        self._limits = limits
        self.shared = SharedReads(limits.block_size)
        self._prompts_first = scheduling is Scheduling.SGLANG

    def plan(self) -> StepPlan:
        """The next step, its blocks allocated; with no work when nothing can run."""
        return self._plan_apart() if self._prompts_first else self._plan_mixed()

    def wait(self, sequence: Sequence) -> None:
        """At its place in the queue."""
        insort(self.waiting, sequence, key=_order)

    def go_ahead(self, sequence: Sequence) -> None:
        """Move a running sequence that sampled its first token before those without one."""
        del self.running[bisect_left(self.running, sequence.order, key=_order)]
        sequence.go_ahead()
        insort(self.running, sequence, key=_order)

    def leave(self, sequence: Sequence) -> None:
        """One that runs or waits does neither any more; its blocks are the caller's."""
        self.shared.remove(sequence)
        queue = self.running if sequence.phase is Phase.RUNNING else self.waiting
        del queue[bisect_left(queue, sequence.order, key=_order)]

    def grow(self, sequence: Sequence, num_more: int = 1) -> bool:
        """Blocks more, at the cost of others if need be; False when it had to yield itself. Not for one that lends."""
        while (blocks := self.allocate(num_more)) is None:
            victim = next(one for one in reversed(self.running) if not one.num_lent)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += blocks
        return True

    def allocate(self, count: int) -> list[BlockId] | None:
        """Blocks to write to, or none at all: also those that are kept for who waits."""
        num_lacking = count - self._pool.num_free
        if num_lacking > 0 and not self._arrivals.can_free(num_lacking):
            return None
        while (blocks := self._pool.allocate(count)) is None:
            if not self._arrivals.give_up():
                return None
        return blocks

    def reusable_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Of the blocks that it need not compute where they are found: its last token is always computed."""
        if sequence.needs_prompt_logits:
            return []
        num_blocks = (len(sequence.tokens) - 1) // self._limits.block_size
        sequence.naming.reach(sequence.tokens, num_blocks)
        return sequence.naming.names.keys[:num_blocks]

    def is_starved(self, sequence: Sequence) -> bool:
        """Whether it is the first that waits, and for nothing but blocks."""
        if self.waiting[0] is not sequence or len(self.running) >= self._limits.max_num_seqs:
            return False
        num_blocks = -(-len(sequence.tokens) // self._limits.block_size)
        num_found = self._pool.match(self.reusable_keys(sequence))
        return num_blocks + len(self.running) - num_found > self._pool.num_free

    def _plan_mixed(self) -> StepPlan:
        decodes, prefilling, context_tokens = self._plan_decodes()
        beside = StepStats(len(decodes), context_tokens=context_tokens, shared_tokens=self.shared.num_tokens)
        prefills, stats = self._plan_prefills(prefilling, beside, others_decode=bool(decodes))
        return StepPlan(decodes, prefills, stats)

    def _plan_apart(self) -> StepPlan:
        plan = self._plan_prompts()
        if plan.prefills:
            return plan
        decodes, _, context_tokens = self._plan_decodes()
        if decodes:
            stats = StepStats(len(decodes), 0, 0, context_tokens, 0.0, self.shared.num_tokens)
            return StepPlan(decodes, [], stats)
        return self._plan_prompts()  # nobody, or one that yielded: what it let go may be room for another

    def _plan_prompts(self) -> StepPlan:
        prefilling = [one for one in self.running if one.num_computed < one.num_to_prefill]
        others_decode = len(prefilling) < len(self.running)
        prefills, stats = self._plan_prefills(prefilling, StepStats(), others_decode=others_decode)
        return StepPlan([], prefills, stats)

    def _plan_decodes(self) -> tuple[list[Work], list[Sequence], int]:
        """The decodes, each with a block for its token; who prefills; how much KV the decodes read.

        A victim is the last of the running ones that lend nothing, so it was not looked at yet or is the one in need
        itself. Behind that one are then only those that lend, and they prefill.
        """
        decodes: list[Work] = []
        prefilling: list[Sequence] = []
        context_tokens = 0
        block_size = self._limits.block_size
        for sequence in self.running:  # which may lose some of its end meanwhile: that ends the loop earlier
            start = sequence.num_computed
            if start < sequence.num_to_prefill:
                prefilling.append(sequence)
                continue
            if start >= len(sequence.blocks) * block_size and not self.grow(sequence):
                prefilling += self.running[len(decodes) + len(prefilling) :]
                break
            if start == sequence.num_to_prefill:
                self.shared.add(sequence)
            decodes.append(Work(sequence, start, 1))
            context_tokens += start + 1
        return decodes, prefilling, context_tokens

    def _plan_prefills(
        self, prefilling: list[Sequence], beside: StepStats, *, others_decode: bool
    ) -> tuple[list[Work], StepStats]:
        """Chunks of those that prefill, then of new ones, beside the decodes of the step; and the step as a whole."""
        prefills: list[Work] = []
        stats, pace = beside, self.pace
        budget = self._limits.max_batch_tokens - beside.batch
        limit_s = inf
        if pace is not None:
            limit_s = pace.limit_s(beside, others_decode)
            if pace.most_prompt_tokens is not None:
                budget = min(budget, max(pace.most_prompt_tokens, self._limits.block_size))
        short: list[Sequence] = []
        if pace is not None:
            short = self._take_short(prefilling, stats, pace.model, limit_s, budget // 2)
        others = (one for one in prefilling if one not in short)
        for sequence in chain(short, others, self._admissions()):
            start = sequence.num_computed
            end = sequence.ahead[0] * self._limits.block_size or sequence.num_to_prefill
            wanted = min(end - start, budget - stats.prefill_tokens)
            if sequence.ahead[0]:
                wanted = min(wanted, meeting_tokens(end - start, self._limits.max_batch_tokens))
            chunk = wanted if pace is None else self._tokens_within(limit_s, pace.model, stats, start, wanted)
            if not chunk:
                if prefills:
                    break
                chunk = min(wanted, self._limits.block_size)
            stats = with_chunk(stats, start, chunk)
            prefills.append(Work(sequence, start, chunk))
            if stats.prefill_tokens == budget or chunk < wanted:
                break
        return prefills, stats

    def _tokens_within(
        self, limit_s: float, model: StepModel, stats: StepStats, start: int, wanted: int
    ) -> int:
        """Tokens after `start` that may join a step: all, or up to a block boundary, or none."""
        if model.step_s(with_chunk(stats, start, wanted)) <= limit_s:
            return wanted
        ends = range(-start % self._limits.block_size, wanted, self._limits.block_size)
        count = bisect_right(ends, limit_s, key=lambda chunk: model.step_s(with_chunk(stats, start, chunk)))
        return ends[count - 1] if count else 0

    def _take_short(
        self, prefilling: list[Sequence], stats: StepStats, model: StepModel, limit_s: float, most_tokens: int
    ) -> list[Sequence]:
        """Those that go before the first, see the module; admitted where they waited."""
        queue = [*prefilling, *self.waiting[:_LOOK_AHEAD]]
        if len(queue) < 2:
            return []
        start, num_left = self._left(queue[0])
        if model.step_s(with_chunk(stats, start, num_left)) <= limit_s:
            return []
        stats = with_chunk(
            stats, start, min(num_left, self._limits.block_size)
        )  # it gets a block in any case
        half_s = (model.step_s(stats) + limit_s) / 2
        short: list[Sequence] = []
        for sequence in queue[1:]:
            after = with_chunk(stats, *self._left(sequence))
            if sequence.ahead[0] or after.prefill_tokens > most_tokens or model.step_s(after) > half_s:
                continue
            if sequence.phase is Phase.WAITING and not self._admit_early(sequence):
                continue
            short.append(sequence)
            stats = after
        return short

    def _left(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens that are computed of a prompt, or will be found when it is admitted; and the others."""
        if sequence.phase is Phase.RUNNING:
            return sequence.num_computed, sequence.num_to_prefill - sequence.num_computed
        num_found = self._pool.match(self.reusable_keys(sequence)) * self._limits.block_size
        return num_found, len(sequence.tokens) - num_found

    def _admit_early(self, sequence: Sequence) -> bool:
        """Admit one that waits if the first that waits finds a place and blocks after it as well."""
        waiting = [self.waiting[0]] if sequence is self.waiting[0] else [self.waiting[0], sequence]
        num_running = len(self.running) + len(waiting)
        num_blocks = sum(-(-len(one.tokens) // self._limits.block_size) for one in waiting)
        if num_running > self._limits.max_num_seqs or num_blocks + num_running > self._pool.num_free:
            return False
        return self._admit(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.leave(sequence)
        self._pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_computed = sequence.num_sealed = sequence.num_to_prefill = 0
        sequence.ahead = (0, 0)
        sequence.phase = Phase.WAITING
        self.wait(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _admissions(self) -> Iterator[Sequence]:
        """Sequences as they are admitted, for as long as there is a place, room and someone who asks for more."""
        while self.waiting and len(self.running) < self._limits.max_num_seqs:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                return
            yield sequence

    def _admit(self, sequence: Sequence) -> bool:
        """One that waits runs, if there are blocks for it."""
        if not self._find_blocks(sequence):
            return False
        self.leave(sequence)
        self._arrivals.let_go(sequence.request.request_id)
        insort(self.running, sequence, key=_order)
        sequence.phase = Phase.RUNNING
        return True

    def _find_blocks(self, sequence: Sequence) -> bool:
        """Cached and fresh blocks for all tokens of the first that waits, or none."""
        block_size = self._limits.block_size
        length = len(sequence.tokens)
        num_blocks = -(-length // block_size)
        request_id = sequence.request.request_id
        keys = self.reusable_keys(sequence)
        num_missing = num_blocks + len(self.running) - self._pool.match(keys)
        num_lacking = num_missing - self._pool.num_free
        if num_lacking > 0 and not self._arrivals.can_free(num_lacking, spared=request_id):
            return False  # at a long queue's head this is the usual end: nothing was touched for it
        while num_missing > self._pool.num_free or (taken := self._take(keys, num_blocks)) is None:
            if not self._arrivals.give_up(spared=request_id):
                return False
        found, fresh = taken
        sequence.blocks = found + fresh
        sequence.num_computed = len(found) * block_size
        sequence.num_sealed = len(found)
        sequence.num_to_prefill = length
        if sequence.num_cached is None:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        return True

    def _take(self, keys: list[BlockKey], num_blocks: int) -> tuple[list[BlockId], list[BlockId]] | None:
        """What is found of a sequence of so many blocks, and fresh ones for the rest; None where that would leave less
        than a block for each that runs: some of those found may have been among the free."""
        found = self._pool.acquire(keys)
        num_missing = num_blocks - len(found)
        fresh = None
        if num_missing + len(self.running) <= self._pool.num_free:
            fresh = self._pool.allocate(num_missing)
        if fresh is None:
            self._pool.release(reversed(found))
            return None
        return found, fresh
