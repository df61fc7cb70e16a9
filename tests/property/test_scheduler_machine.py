"""A scheduler under whatever comes: arrivals, aborts, small pools, handoffs. Everything ends as if it were alone."""

from __future__ import annotations

from itertools import combinations
from math import inf
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.kv.names import Mirror, seen
from tests.unit.scheduler.scheduler_lab import Lab, alone, limits, names_of, request, scheduler, states_of

from kvolt.core.errors import InvalidRequest, Overloaded
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Request, StopConditions
from kvolt.kv import BlockId
from kvolt.scheduler.sequence import Phase, Sequence
from kvolt.scheduler.step_pace import StepPace
from kvolt.scheduler.step_plan import Scheduling

LONGEST = (1, 2, 1, 1, 2, 2, 1)
PROMPTS = [LONGEST[start:end] for start in range(3) for end in range(start + 1, len(LONGEST) + 1)]
KINDS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"n": 3},
    {"priority": 1},
    {"priority": 1, "n": 2},
    {"salt": "other"},
    {"prompt_logprobs": 1},
    {"prior_tokens": (1, 2)},
    {"prompt_logprobs": 1, "n": 2, "prior_tokens": (1,)},
]
STOPS: list[dict[str, Any]] = [
    {},
    {"ignore_eos": False},
    {"stop": (0, 3)},
    {"ignore_eos": False, "stop": (0, 3), "min_tokens": 2},
]
requests = st.builds(
    lambda prompt, max_tokens, kind, stop: request("", prompt, max_tokens, **kind, **stop),
    st.sampled_from(PROMPTS),
    st.integers(1, 12),
    st.sampled_from(KINDS),
    st.sampled_from(STOPS),
)
"""Few draws for each, since drawing is what takes the time."""
picks = st.integers(0, 1000)
MOST_TIMED = 3
"""Prompt tokens, where steps are cut by predicted time."""


class Schedulers(RuleBasedStateMachine):
    scheduling = Scheduling.VLLM
    step_model: LatencyModel | None = None

    @initialize(
        num_blocks=st.integers(4, 9),
        block_size=st.integers(1, 3),
        max_num_seqs=st.integers(1, 6),
        spare_tokens=st.integers(0, 6),
        max_waiting=st.sampled_from((2, 30)),
    )
    def start(
        self, num_blocks: int, block_size: int, max_num_seqs: int, spare_tokens: int, max_waiting: int
    ) -> None:
        bounds = limits(max_num_seqs, max_num_seqs + spare_tokens, max_waiting, 32, block_size)
        self.lab = Lab(scheduler(num_blocks, bounds, self.scheduling))
        self.scheduler = self.lab.scheduler
        self.scheduler.planner.pace = (
            None if self.step_model is None else StepPace(self.step_model, MOST_TIMED)
        )
        self.open: dict[RequestId, Request] = {}
        """Requests that are to end by themselves."""
        self.keeping: dict[RequestId, Request] = {}
        """Those of them whose blocks are to stay, and those that have ended and are kept."""
        self.lent: dict[RequestId, tuple[Request, list[BlockId]]] = {}
        """Blocks of prompts that a peer was told of and may read."""
        self.adopted: list[tuple[Request, list[tuple[int, BlockId]]]] = []
        self.expected: dict[RequestId, Request] = {}
        """For which blocks came; they may come as well, or not."""
        self.now = 0.0
        self.mirror = Mirror()
        self.num_added = 0

    # --- requests

    @rule(templates=st.lists(requests, min_size=1, max_size=4))
    def arrive(self, templates: list[Request]) -> None:
        for template in templates:
            self.add(template, keep_blocks=False)

    @rule(template=requests, keep_blocks=st.booleans())
    def add(self, template: Request, keep_blocks: bool) -> None:
        self.num_added += 1
        self.submit(replaced(template, RequestId(f"r{self.num_added}")), keep_blocks)

    def submit(self, request: Request, keep_blocks: bool) -> None:
        is_full = self.scheduler.num_waiting >= self.scheduler.limits.max_waiting
        try:
            self.scheduler.add_request(request, keep_blocks=keep_blocks)
        except InvalidRequest:
            assert not self.can_end(request)
            return
        except Overloaded:
            assert is_full
            return
        assert self.can_end(request)
        assert not is_full
        self.open[request.request_id] = request
        if keep_blocks:
            self.keeping[request.request_id] = request

    def can_end(self, request: Request) -> bool:
        stop = request.stop
        num_computed = len(request.token_ids) + stop.max_tokens - 1
        room = self.scheduler.pool.num_blocks * self.scheduler.limits.block_size
        return num_computed <= room and len(request.prior_tokens) < stop.max_tokens >= stop.min_tokens

    @precondition(lambda self: self.open)
    @rule(number=picks, only_if_not_started=st.booleans())
    def stop(self, number: int, only_if_not_started: bool) -> None:
        request_id = list(self.open)[number % len(self.open)]
        if only_if_not_started:
            spoke = any(choice[0] == request_id for choice in self.lab.said)
            if not self.scheduler.withdraw(request_id):
                return
            assert not spoke
        else:
            assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        self.gone(request_id)

    def gone(self, request_id: RequestId) -> None:
        del self.open[request_id]
        if self.scheduler.holds.find(request_id) is None:  # its first choice may have ended before the others
            self.keeping.pop(request_id, None)

    # --- steps

    @precondition(lambda self: self.lab.plan is None and self.scheduler.has_work)
    @rule()
    def begin(self) -> None:
        self.lab.begin()

    @precondition(lambda self: self.lab.plan is not None)
    @rule()
    def finish(self) -> None:
        for one in self.lab.finish():
            request = one.sequence.request
            said, end = alone(request, one.sequence.index)
            so_far = self.lab.said[request.request_id, one.sequence.index]
            assert so_far == said[: len(so_far)]
            assert one.end == (end if len(so_far) == len(said) else None)
        for request in list(self.open.values()):
            choices = [(request.request_id, index) for index in range(request.sampling.num_choices)]
            if all(choice in self.lab.ends for choice in choices):
                del self.open[request.request_id]

    @precondition(lambda self: self.scheduler.has_work)
    @rule(count=st.integers(1, 12))
    def go_on(self, count: int) -> None:
        """Enough steps in a row to fill the pool."""
        for _ in range(count):
            if self.lab.plan is None and self.lab.begin() is None:
                return
            self.finish()

    @precondition(lambda self: self.lab.plan is not None)
    @rule()
    def discard(self) -> None:
        self.scheduler.discard(self.lab.plan)
        self.lab.plan = None

    # --- blocks

    @rule()
    def clear(self) -> None:
        self.scheduler.clear()

    @precondition(lambda self: self.keeping)
    @rule()
    def fetch(self) -> None:
        """A peer reads what is kept longest, and lets it go."""
        request_id, request = next(iter(self.keeping.items()))
        kept = self.scheduler.holds.find(request_id)
        if kept is None:
            assert request_id in self.open
            assert not self.scheduler.release_kept(request_id)
            return
        blocks, names = kept
        block_size = self.scheduler.limits.block_size
        tokens = [*request.token_ids, *self.lab.said[request_id, 0]][:-1]  # the last one is not computed
        assert len(blocks) == -(-len(tokens) // block_size)
        assert names == names_of(request, tokens, block_size)
        states = [self.lab.memory[blocks[at // block_size], at % block_size] for at in range(len(tokens))]
        assert states == states_of(request, tokens)
        self.lent.pop(request_id, None)
        assert self.scheduler.release_kept(request_id)
        assert self.scheduler.holds.find(request_id) is None
        del self.keeping[request_id]

    @rule(template=requests, length=st.integers(7, 14), num_steps=st.integers(1, 3), fails=st.booleans())
    def prefill(self, template: Request, length: int, num_steps: int, fails: bool) -> None:
        """A prompt for others, as `Prefills` asks for it, and a peer that is told of its start; it may fail."""
        stop = StopConditions(max_tokens=len(template.prior_tokens) + 1)
        prompt = (*LONGEST, *LONGEST)[:length]
        self.add(msgspec.structs.replace(template, token_ids=prompt, stop=stop), True)
        for _ in range(num_steps):
            if self.lab.plan is not None:
                self.finish()
            if self.keeping:
                self.lend(len(self.keeping) - 1, 0)
            if self.scheduler.has_work:
                self.lab.begin()
        latest = next(reversed(self.keeping), None)
        if fails and latest in self.open:
            self.scheduler.abort(latest)
            self.gone(latest)

    @precondition(lambda self: self.keeping)
    @rule(number=picks, after=st.integers(0, 3))
    def lend(self, number: int, after: int) -> None:
        """A peer is told of the blocks of a prompt that is computed for it."""
        request_id, request = list(self.keeping.items())[number % len(self.keeping)]
        if request.stop.max_tokens > len(request.prior_tokens) + 1:
            return
        lent = self.scheduler.lend_blocks(request_id, after)
        if lent is None:
            return
        blocks, names = lent
        assert len(names) > after or self.scheduler.holds.find(request_id) is not None
        _, known = self.lent.get(request_id, (request, []))
        assert blocks[: len(known)] == known, "what was lent has moved"
        self.lent[request_id] = (request, blocks[: len(names)])

    @precondition(lambda self: self.lent.keys() - self.open.keys() - self.keeping.keys())
    @rule()
    def let_go(self) -> None:
        """A reader of a failed prompt's blocks has received the failure."""
        request_id = next(each for each in self.lent if each not in self.open and each not in self.keeping)
        _, blocks = self.lent.pop(request_id)
        assert self.scheduler.release_kept(request_id) == bool(blocks)

    @precondition(lambda self: not self.adopted)
    @rule(template=requests)
    def adopt(self, template: Request) -> None:
        names = names_of(template, list(template.token_ids), self.scheduler.limits.block_size)
        adopted = self.scheduler.holds.allocate_incoming(names)
        assert len(adopted) <= len(names)
        if adopted:
            self.adopted.append((template, adopted))

    @precondition(lambda self: self.adopted)
    @rule(number=picks, num_missing=st.sampled_from((0, 0, 1)), keep_for=st.sampled_from(("", "new", "here")))
    def seal(self, number: int, num_missing: int, keep_for: str) -> None:
        request, adopted = self.adopted.pop(number % len(self.adopted))
        num_filled = len(adopted) - num_missing
        block_size = self.scheduler.limits.block_size
        states = states_of(request, list(request.token_ids))
        for position, block in adopted[:num_filled]:
            self.lab.fill(block, states[position * block_size :][:block_size])
        kept_for = self.pick(keep_for, number)
        if kept_for is not None and kept_for not in self.open:
            self.expected[kept_for] = request
        expires_at = self.now + 1 + number % 3
        self.scheduler.incoming.commit(adopted, num_filled if num_missing else None, kept_for, expires_at)

    def pick(self, keep_for: str, number: int) -> RequestId | None:
        """The request that blocks are kept for: none, one that has not arrived, or a known one."""
        if keep_for == "new":
            self.num_added += 1
            return RequestId(f"r{self.num_added}")
        return list(self.open)[number % len(self.open)] if keep_for and self.open else None

    @precondition(lambda self: not self.adopted)
    @rule(templates=st.lists(requests, min_size=1, max_size=3))
    def send(self, templates: list[Request]) -> None:
        """Prompts that others have computed, ahead of their requests."""
        for template in templates:
            self.adopt(template)
            if self.adopted:
                self.seal(0, 0, "new")

    @precondition(lambda self: self.expected)
    @rule(number=picks, is_another=st.booleans(), template=requests)
    def come(self, number: int, is_another: bool, template: Request) -> None:
        """A request that blocks came for, perhaps with another prompt than theirs."""
        request_id = list(self.expected)[number % len(self.expected)]
        known = self.expected.pop(request_id)
        self.submit(replaced(template if is_another else known, request_id), False)

    @precondition(lambda self: self.expected)
    @rule(number=picks, is_aborted=st.booleans())
    def never_come(self, number: int, is_aborted: bool) -> None:
        request_id = list(self.expected)[number % len(self.expected)]
        del self.expected[request_id]
        if is_aborted:
            assert not self.scheduler.abort(request_id)
        else:
            self.scheduler.prefetched.release_expected(request_id)

    @rule()
    def expire(self) -> None:
        self.now += 1
        self.scheduler.prefetched.expire(self.now)
        next_expiry = self.scheduler.prefetched.next_expiry
        assert next_expiry is None or next_expiry > self.now

    # ---

    @invariant()
    def everything_agrees(self) -> None:
        self.scheduler.check_integrity()
        self.mirror.apply(self.scheduler.take_changes())
        assert self.mirror.positions == seen(self.scheduler.pool)

    @invariant()
    def what_is_lent_is_what_it_should_be(self) -> None:
        block_size = self.scheduler.limits.block_size
        for asked, blocks in self.lent.values():
            tokens = [*asked.token_ids, *asked.prior_tokens][: len(blocks) * block_size]
            states = [self.lab.memory[blocks[at // block_size], at % block_size] for at in range(len(tokens))]
            assert states == states_of(asked, tokens)
            assert all(self.scheduler.pool.num_holders(block) for block in blocks)

    @invariant()
    def blocks_are_shared_by_equal_keys_only(self) -> None:
        for one, other in combinations(running(self.scheduler), 2):
            for block in set(one.blocks) & set(other.blocks):
                position = one.blocks.index(block)
                assert other.blocks.index(block) == position
                assert one.naming.names.keys[position] == other.naming.names.keys[position]

    def teardown(self) -> None:
        if not hasattr(self, "lab"):
            return
        if self.lab.plan is not None:
            self.finish()
        while self.adopted:
            self.seal(0, 0, "new")
        while self.lent.keys() - self.open.keys() - self.keeping.keys():
            self.let_go()
        self.lent.clear()
        for request_id in list(self.keeping):
            if self.scheduler.release_kept(request_id):
                del self.keeping[request_id]
        num_steps = 0
        while self.scheduler.has_work:
            assert self.lab.begin() is not None, "nothing can run, and not all has ended"
            self.finish()
            self.everything_agrees()
            for request_id in list(self.keeping):
                if self.scheduler.release_kept(request_id):
                    del self.keeping[request_id]
            num_steps += 1
            assert num_steps < 3000
        assert not self.open
        # Only now: blocks kept for requests that did not arrive must not have delayed others.
        self.scheduler.prefetched.expire(inf)
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert self.scheduler.pool.num_used == 0
        self.everything_agrees()


def replaced(template: Request, request_id: RequestId) -> Request:
    return Request(
        request_id=request_id,
        model=template.model,
        token_ids=template.token_ids,
        stop=template.stop,
        sampling=template.sampling,
        routing=template.routing,
        prior_tokens=template.prior_tokens,
        salt=template.salt,
    )


def running(one: object) -> list[Sequence]:
    sequences: list[Sequence] = one.planner.running  # type: ignore[attr-defined]
    assert all(sequence.phase is Phase.RUNNING for sequence in sequences)
    return sequences


class PromptsFirst(Schedulers):
    scheduling = Scheduling.SGLANG

    @invariant()
    def prompts_and_answers_have_steps_of_their_own(self) -> None:
        plan = self.lab.plan
        assert plan is None or not (plan.decodes and plan.prefills)


class ByTime(Schedulers):
    """Steps are cut by predicted time, so short prompts go before long ones."""

    step_model = LatencyModel(base_s=0.01, prefill_token_s=0.015)

    @invariant()
    def steps_with_prompts_are_within_their_limits(self) -> None:
        plan, pace = self.lab.plan, self.scheduler.planner.pace
        assert pace is not None
        if plan is None or not plan.prefills:
            return
        num_tokens, block_size = plan.stats.prefill_tokens, self.scheduler.limits.block_size
        assert num_tokens <= max(2 * MOST_TIMED, block_size)
        is_least = len(plan.prefills) == 1 and num_tokens <= block_size
        beside = msgspec.structs.replace(plan.stats, prefill_tokens=0, prefill_context=0)
        limit_s = pace.limit_s(beside, others_decode=bool(plan.decodes))
        assert is_least or pace.model.step_s(plan.stats) <= limit_s


TestSchedulers = Schedulers.TestCase
TestByTime = ByTime.TestCase
TestPromptsFirst = PromptsFirst.TestCase
