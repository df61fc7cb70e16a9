"""A scheduler with a model that is a hash: its next token depends on all before it, read from blocks only.

What lies at each place of a block is the digest of the sequence up to there, and a step finds its context
nowhere else. A block that was lost, given twice or shared wrongly therefore gives other tokens.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import chain

import xxhash

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.delta import ChoiceEnd, FinishReason
from kvolt.core.ids import RequestId
from kvolt.core.load import StepStats
from kvolt.core.request import Request, RoutingHints, Sampling, StopConditions
from kvolt.kv import BlockId, BlockNames, BlockPool
from kvolt.scheduler.scheduler import Limits, NewToken, Scheduler, StepPlan, Work
from kvolt.scheduler.sequence import Sequence, TokenNaming
from kvolt.scheduler.step_plan import Scheduling

EOS = 0
NUM_TOKENS = 7
"""The model says tokens 0 to 6."""


def request(
    request_id: str,
    prompt: tuple[int, ...] = (1, 2, 3),
    max_tokens: int = 4,
    *,
    n: int = 1,
    priority: int = 0,
    ignore_eos: bool = True,
    min_tokens: int = 0,
    stop: tuple[int, ...] = (),
    prior_tokens: tuple[int, ...] = (),
    salt: str | None = None,
    prompt_logprobs: int | None = None,
) -> Request:
    return Request(
        request_id=RequestId(request_id),
        model="lab",
        token_ids=prompt,
        stop=StopConditions(
            max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop, ignore_eos=ignore_eos
        ),
        sampling=Sampling(num_choices=n, prompt_logprobs=prompt_logprobs),
        routing=RoutingHints(priority=priority),
        prior_tokens=prior_tokens,
        salt=salt,
    )


def limits(
    max_num_seqs: int = 4,
    max_batch_tokens: int = 16,
    max_waiting: int = 64,
    context_length: int = 256,
    block_size: int = 2,
) -> Limits:
    return Limits(
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_waiting=max_waiting,
        context_length=context_length,
        block_size=block_size,
    )


def scheduler(
    num_blocks: int = 32, bounds: Limits | None = None, scheduling: Scheduling = Scheduling.VLLM
) -> Scheduler:
    bounds = bounds or limits()

    def context(request: Request) -> BlockKeyContext:
        return BlockKeyContext(
            weights_hash="w", dtype="f4", block_size=bounds.block_size, layout="lab", salt=request.salt
        )

    return Scheduler(BlockPool(num_blocks), bounds, (EOS,), context, scheduling)


def digest(before: int, token: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QI", before, token))


def root(request: Request) -> int:
    return xxhash.xxh3_64_intdigest((request.salt or "").encode())


def states_of(request: Request, tokens: list[int]) -> list[int]:
    """What lies at each place of the blocks of a sequence."""
    state = root(request)
    return [state := digest(state, token) for token in tokens]


def names_of(request: Request, tokens: list[int], block_size: int) -> BlockNames:
    naming = TokenNaming(request, scheduler(1, limits(block_size=block_size))._keys(request))
    naming.reach(tokens, len(tokens) // block_size)
    return naming.names


def next_token(state: int, index: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QI", state, index), 1) % NUM_TOKENS


def alone(request: Request, index: int = 0) -> tuple[list[int], ChoiceEnd]:
    """What a choice says, and how it ends, when nothing else is in the world: the contract's words again."""
    stop = request.stop
    state = root(request)
    for token in (*request.token_ids, *request.prior_tokens):
        state = digest(state, token)
    said = list(request.prior_tokens)
    while True:
        token = next_token(state, index)
        may_stop = len(said) >= stop.min_tokens
        said.append(token)
        state = digest(state, token)
        if may_stop and token == EOS and not stop.ignore_eos:
            return said, ChoiceEnd(FinishReason.STOP)
        if may_stop and token in stop.stop_token_ids:
            return said, ChoiceEnd(FinishReason.STOP, token)
        if len(said) == stop.max_tokens:
            return said, ChoiceEnd(FinishReason.LENGTH)


@dataclass
class Lab:
    """Computes the plans of a scheduler and remembers what came of each choice."""

    scheduler: Scheduler
    memory: dict[tuple[BlockId, int], int] = field(default_factory=dict)
    said: dict[tuple[RequestId, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[RequestId, int], ChoiceEnd] = field(default_factory=dict)
    cached: dict[tuple[RequestId, int], int] = field(default_factory=dict)
    plan: StepPlan | None = None
    tables: list[list[BlockId]] = field(default_factory=list)
    """The blocks of each Work as they were when the step began: an abort does not reach into a running step."""

    def begin(self) -> StepPlan | None:
        """Plan a step; it now runs."""
        self.plan = self.scheduler.plan()
        if self.plan is not None:
            self._check_plan(self.plan)
            self.tables = [list(work.sequence.blocks) for work in self._works()]
            for work, table in zip(self._works(), self.tables, strict=True):
                self._check_writes(work, table)
        return self.plan

    def finish(self) -> list[NewToken]:
        """The step is done: its KV is written, its tokens are told."""
        assert self.plan is not None
        for table in self.tables:  # those of aborted sequences too: the step has them to write to
            assert all(self.scheduler.pool.num_holders(block) for block in table)
        sampled = [
            next_token(self._compute(work, table), work.sequence.index)
            if work.samples
            else self._compute(work, table)
            for work, table in zip(self._works(), self.tables, strict=True)
        ]
        chosen = [token for work, token in zip(self._works(), sampled, strict=True) if work.samples]
        plan, self.plan = self.plan, None
        new_tokens = self.scheduler.commit(plan, chosen)
        for one in new_tokens:
            self._note(one)
        return new_tokens

    def step(self) -> list[NewToken]:
        assert self.begin() is not None, "nothing could run"
        return self.finish()

    def run(self, max_steps: int = 2000) -> None:
        """To the end of all requests."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
            self.scheduler.check_integrity()
        raise AssertionError(f"no end after {max_steps} steps")

    def fill(self, block: BlockId, states: list[int]) -> None:
        """KV that came from elsewhere."""
        for offset, state in enumerate(states):
            self.memory[block, offset] = state

    # ---

    def _works(self) -> list[Work]:
        assert self.plan is not None
        return list(chain(self.plan.decodes, self.plan.prefills))

    def _check_plan(self, plan: StepPlan) -> None:
        bounds = self.scheduler.limits
        assert all(work.num_tokens == 1 and work.samples for work in plan.decodes)
        assert all(work.num_tokens >= 1 for work in plan.prefills)
        assert all(work.start == work.sequence.num_computed for work in self._works())
        assert sum(work.num_tokens for work in self._works()) <= bounds.max_batch_tokens
        assert len({work.sequence for work in self._works()}) == len(self._works())
        assert self.scheduler.num_running <= bounds.max_num_seqs
        prompt_blocks = [
            block
            for work in plan.decodes
            for block in work.sequence.blocks[: work.sequence.num_to_prefill // bounds.block_size]
        ]
        assert plan.stats == StepStats(
            batch=len(plan.decodes),
            prefill_tokens=sum(work.num_tokens for work in plan.prefills),
            prefill_context=sum(work.num_tokens * (work.start + work.num_tokens) for work in plan.prefills),
            context_tokens=sum(len(work.sequence.tokens) for work in plan.decodes),
            shared_tokens=bounds.block_size * (len(prompt_blocks) - len(set(prompt_blocks))),
        )

    def _check_writes(self, work: Work, table: list[BlockId]) -> None:
        block_size = self.scheduler.limits.block_size
        last = (work.start + work.num_tokens - 1) // block_size
        for block in table[work.start // block_size : last + 1]:
            assert self.scheduler.pool.num_holders(block) == 1, f"{block} is written and shared"
            assert self.scheduler.pool.name_of(block) is None, f"{block} is written and has a name"

    def _compute(self, work: Work, table: list[BlockId]) -> int:
        block_size = self.scheduler.limits.block_size
        tokens = work.sequence.tokens
        state = root(work.sequence.request)
        for position in range(work.start):
            state = digest(state, tokens[position])
            place = (table[position // block_size], position % block_size)
            assert self.memory[place] == state, f"wrong KV at {position} of {work}"
        for position in range(work.start, work.start + work.num_tokens):
            state = digest(state, tokens[position])
            self.memory[table[position // block_size], position % block_size] = state
        return state

    def _note(self, new: NewToken) -> None:
        sequence: Sequence = new.sequence
        choice = (sequence.request.request_id, sequence.index)
        assert new.is_first == (choice not in self.said), new
        assert choice not in self.ends, f"{choice} goes on after its end"
        assert sequence.num_cached is not None
        said = self.said.setdefault(choice, list(sequence.request.prior_tokens))
        said.append(new.token)
        assert self.cached.setdefault(choice, sequence.num_cached) == sequence.num_cached
        if new.end is not None:
            self.ends[choice] = new.end

    def check_answer(self, request: Request) -> None:
        """Every choice of it said what it says alone, and ended."""
        for index in range(request.sampling.num_choices):
            choice = (request.request_id, index)
            assert (self.said.get(choice), self.ends.get(choice)) == alone(request, index), choice
