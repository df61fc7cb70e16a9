"""Base of the engine suite: a started engine, its answers, checks of every step, and a replica of its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Delta, FinishReason, StageTimes, StepOutput, TokenLogprobs, Usage, plain_delta
from kvolt.core.errors import ErrorInfo, Unsupported
from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import RequestId, SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.engines.contract import Engine, check_sampling_fields
from kvolt.runtime.tasks import Scope

_DEADLINE_S = 30.0


class NotRun(Exception):
    """The case is not possible with this harness or setup, and why. Not a failure of the engine."""


class Harness(Protocol):
    """Creates engines and prompts. The cases fit a context of 256 tokens.

    Methods raise NotRun if they have no result. Optional attributes: `deadline_s`, maximum wait for a start or an
    event (default 30 s); `settle_s`, delay of KV events after the step that stored the block, for engines that publish
    events asynchronously (default none).
    """

    def engine(self) -> Engine:
        """Return a new engine for the running loop, not started, with capacity for 200 running or waiting requests."""
        ...

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Return valid tokens; a longer prompt has the shorter ones as prefix."""
        ...

    def ending_prompt(self) -> tuple[int, ...]:
        """Return a prompt of at most 128 tokens with short answers.

        With seed 1 the first two choices end by EOS, at different lengths from 2 to 64 tokens.
        """
        ...


Case = Callable[[Harness], Awaitable[None]]


@dataclass(slots=True)
class Answer:
    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    stop_reasons: dict[int, int | str | None] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached: int | None = None
    """Cached prompt tokens, as reported with the first delta."""
    stages: StageTimes | None = None
    """KV transfer times, if the engine reports them."""
    error: ErrorInfo | None = None
    may_fail: bool = False
    stopped: bool = False
    """Aborted or withdrawn: no more deltas are allowed."""

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.finishes) == len(self.request.open_choices)

    @property
    def is_open(self) -> bool:
        return not (self.done or self.stopped)

    def num_before(self, index: int) -> int:
        """Tokens of a choice that the client received before this request."""
        handoff = self.request.handoff
        has_first = handoff is not None and handoff.first_tokens is not None
        return len(self.request.prior_tokens_of(index)) + (1 if has_first else 0)

    def add_delta(self, delta: Delta) -> None:
        name = self.request.request_id
        assert not self.stopped, f"{name} got {delta} after it was stopped"
        assert delta.index in self.request.open_choices, f"{name} has no choice {delta.index}"
        assert delta.index not in self.finishes, f"{name} got {delta} after its end"
        tokens = self.tokens.setdefault(delta.index, [])
        tokens.extend(delta.token_ids)
        self._add_logprobs(delta)
        if delta.cached_tokens is not None and not delta.index:
            assert self.cached is None, f"{name} reported its cached tokens twice"
            self.cached = delta.cached_tokens
        if delta.stages is not None:
            assert self.stages is None, f"{name}: transfer times are reported twice"
            self.stages = delta.stages
        assert (delta.usage is None) == (delta.finish is None), (
            f"{name}: usage must come with the finish: {delta}"
        )
        if delta.usage is not None:
            self.usage[delta.index] = delta.usage
            counted = (len(self.request.token_ids), self.num_before(delta.index) + len(tokens))
            assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == counted, f"{name}: {delta}"
        if delta.finish is not None:
            self.finishes[delta.index] = delta.finish
            self.stop_reasons[delta.index] = delta.stop_reason

    def _add_logprobs(self, delta: Delta) -> None:
        name = self.request.request_id
        if self.request.sampling.logprobs is None:
            assert delta.logprobs is None, f"{name} did not ask for logprobs"
        else:
            entries = delta.logprobs or ()
            assert tuple(entry.token_id for entry in entries) == delta.token_ids, f"{name}: {delta}"
            self.logprobs.setdefault(delta.index, []).extend(entries)
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, f"{name} got its prompt's logprobs twice"
            self.prompt_logprobs = delta.prompt_logprobs


class Replica:
    """Blocks of each tier, from KV events. `apply` raises AssertionError for an event that breaks the contract."""

    def __init__(self, changes: Iterable[KvChange] = ()) -> None:
        self.num_removed = 0
        self.num_cleared = 0
        self._tiers: dict[Tier, set[SequenceHash]] = {}
        for change in changes:
            self.apply(change)

    @property
    def blocks(self) -> set[SequenceHash]:
        """Blocks in any tier."""
        return set().union(*self._tiers.values())

    def apply(self, change: KvChange) -> None:
        match change:
            case Stored():
                self._store(change)
            case Removed():
                held = self._tiers.get(change.tier, set())
                for block in change.sequence_hashes:
                    assert block in held, f"block {block:x} was removed but not stored before"
                    held.remove(block)
                    self.num_removed += 1
            case Cleared():
                self.num_cleared += 1
                for tier in [change.tier] if change.tier is not None else list(self._tiers):
                    self._tiers.pop(tier, None)

    def _store(self, change: Stored) -> None:
        assert change.num_blocks, "empty Stored event"
        assert change.parent is None or change.parent in self.blocks, f"stored before its parent: {change}"
        held = self._tiers.setdefault(change.tier, set())
        for block in change.sequence_hashes:
            assert block not in held, f"block {block:x} was stored twice"
            held.add(block)

    def num_leading(self, blocks: Sequence[SequenceHash]) -> int:
        """Number of leading blocks that are held."""
        held = self.blocks
        return next((index for index, block in enumerate(blocks) if block not in held), len(blocks))


def block_hashes(request: Request, block_size: int, output: Sequence[int] = ()) -> list[SequenceHash]:
    """Hashes of the full blocks of a request and its output."""
    hasher = SequenceHasher(block_size, request_seed(request.lora, request.salt), request.media)
    hasher.extend([*request.token_ids, *output])
    return hasher.sequence


class Run:
    """A started engine and its output."""

    def __init__(self, engine: Engine, info: EngineInfo, harness: Harness) -> None:
        self.engine = engine
        self.info = info
        self.load = WorkerLoad()
        self.num_steps = 0
        self.replica = Replica()
        """Blocks of the engine according to its KV events."""
        self.harness = harness
        self._deadline_s = deadline_of(harness)
        self._answers: dict[RequestId, Answer] = {}
        self._step = asyncio.Event()

    def request(
        self,
        name: str,
        *,
        prompt: int = 20,
        tokens: int = 8,
        seed: int = 1,
        choices: int = 1,
        variant: int = 0,
    ) -> Request:
        """Build a request. Each `variant` below the prompt length starts with different tokens."""
        ids = self.harness.prompt(prompt)
        return Request(
            request_id=RequestId(name),
            model=self.info.model,
            token_ids=ids[variant:] + ids[:variant],
            stop=StopConditions(max_tokens=tokens, ignore_eos=True),
            sampling=Sampling(seed=seed, num_choices=choices),
        )

    def short_request(self, name: str, *, tokens: int = 100, choices: int = 1) -> Request:
        """Build a request whose answer ends by EOS."""
        return Request(
            request_id=RequestId(name),
            model=self.info.model,
            token_ids=self.harness.ending_prompt(),
            stop=StopConditions(max_tokens=tokens),
            sampling=Sampling(seed=1, num_choices=choices),
        )

    def submit(self, request: Request, *, may_fail: bool = False) -> Answer:
        try:
            check_sampling_fields(request.sampling, self.engine.sampling_fields, "under test")
        except Unsupported as error:  # a worker refuses such a request before the engine gets it
            raise NotRun(error.message) from error
        self.engine.submit(request)
        answer = self._answers[request.request_id] = Answer(request, may_fail=may_fail)
        return answer

    def abort(self, answer: Answer) -> None:
        answer.stopped = True
        self.engine.abort(answer.request.request_id)

    async def withdraw(self, answer: Answer) -> bool:
        answer.stopped = await self.engine.withdraw(answer.request.request_id)
        return answer.stopped

    async def until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                while not condition():
                    self._step.clear()
                    await self._step.wait()
        except TimeoutError:
            raise AssertionError(
                f"timed out after {self._deadline_s:g} s and {self.num_steps} steps; open requests: "
                f"{', '.join(name for name, answer in self._answers.items() if answer.is_open) or 'nothing'}"
            ) from None

    async def settle(self) -> None:
        """Wait until earlier KV events are delivered."""
        settle_s = float(getattr(self.harness, "settle_s", 0.0))
        if settle_s:
            await asyncio.sleep(settle_s)

    async def advance(self, num_steps: int) -> None:
        target = self.num_steps + num_steps
        await self.until(lambda: self.num_steps >= target)

    async def finish(self, *answers: Answer) -> None:
        await self.until(lambda: all(answer.done for answer in answers))

    async def answer(self, request: Request) -> Answer:
        answer = self.submit(request)
        await self.finish(answer)
        return answer

    async def assert_empty(self) -> None:
        """Check that the engine is empty after a request that ran alone."""
        await self.answer(self.request(f"probe-{self.num_steps}", tokens=3))
        load = self.load
        left = (load.running, load.waiting, load.kv_used_blocks)
        assert left == (0, 0, 0), f"running, waiting, blocks in use: {left}"

    async def read(self) -> None:
        async for step in self.engine.steps():
            self._check_plain(step)
            for request_id, delta in step.deltas:
                self._answers[request_id].add_delta(delta)
            for request_id, token in zip(step.plain_ids, step.plain_tokens, strict=True):
                self._answers[request_id].add_delta(plain_delta(token))
            for request_id, failure in step.failed:
                answer = self._answers[request_id]
                assert answer.may_fail, f"{request_id} failed unexpectedly: {failure}"
                answer.error = failure
            for change in step.kv_changes:
                self.replica.apply(change)
            if step.load is not None:
                self.load = step.load
            self.num_steps += 1
            self._step.set()

    def _check_plain(self, step: StepOutput) -> None:
        """Check that a plain token is the only output of its request in this step."""
        plain = set(step.plain_ids)
        assert len(plain) == len(step.plain_ids) == len(step.plain_tokens), "plain ids and tokens differ"
        both = plain.intersection(request_id for request_id, _ in step.deltas)
        assert not both, f"a plain token and a delta in one step: {sorted(both)}"


def renamed(request: Request, name: str, **changes: Any) -> Request:
    """The request under another id, with changed fields."""
    return replace(request, request_id=RequestId(name), **changes)


def deadline_of(harness: Harness) -> float:
    return float(getattr(harness, "deadline_s", _DEADLINE_S))


@asynccontextmanager
async def engine_run(harness: Harness) -> AsyncIterator[Run]:
    engine = harness.engine()
    async with asyncio.timeout(deadline_of(harness)):
        info = await engine.start()
    async with Scope("engine") as scope:
        run = Run(engine, info, harness)
        scope.start(run.read(), "steps")
        try:
            yield run
        finally:
            await engine.close()
            # Leaving the scope waits for `steps` to end, which detects an engine that does not stop.
