"""What the cases of the engine suite stand on: a started engine, its answers, and the checks of every step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Delta, FinishReason, StageTimes, StepOutput, TokenLogprobs, Usage, plain_delta
from kvolt.core.errors import ErrorInfo
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.engines.contract import Engine
from kvolt.runtime.tasks import Scope
from kvolt.testing.engines.replica import Replica

_DEADLINE_S = 30.0


class NotRun(Exception):
    """A case cannot be run with this harness or this engine as it is set up; says why. No fault of the engine."""


class Harness(Protocol):
    """What a case needs of an implementation. The cases fit a context of 256 tokens.

    A method that has nothing to give raises NotRun. A harness may have an attribute `deadline_s`, the longest wait
    for a start or for the next thing to happen (30 s if it has none), and `settle_s`, how long an engine whose events
    come by a way of their own may tell of a block after the step that made it (not at all if it has none).
    """

    def engine(self) -> Engine:
        """A new engine, not started, for the running loop. It can hold 200 requests, running or waiting."""
        ...

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens that the model takes; a longer prompt begins with the shorter ones."""
        ...

    def ending_prompt(self) -> tuple[int, ...]:
        """One that the model answers shortly: with seed 1 the first two choices end by themselves, one
        later than the other, both after 2 tokens or more and within 64. At most 128 tokens."""
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
    """Tokens of the prompt that the engine had, as told with the first delta."""
    stages: StageTimes | None = None
    """KV transfers, as reported by an engine that moves its KV by itself."""
    error: ErrorInfo | None = None
    may_fail: bool = False
    stopped: bool = False
    """Aborted or withdrawn: nothing may come any more."""

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.finishes) == len(self.request.open_choices)

    @property
    def is_open(self) -> bool:
        return not (self.done or self.stopped)

    def num_before(self, index: int) -> int:
        """Tokens of a choice that the client has from elsewhere."""
        handoff = self.request.handoff
        told = handoff is not None and handoff.first_tokens is not None
        return len(self.request.resumed(index)) + (1 if told else 0)

    def take(self, delta: Delta) -> None:
        name = self.request.request_id
        assert not self.stopped, f"{name} got {delta} after it was stopped"
        assert delta.index in self.request.open_choices, f"{name} has no choice {delta.index}"
        assert delta.index not in self.finishes, f"{name} got {delta} after its end"
        tokens = self.tokens.setdefault(delta.index, [])
        tokens.extend(delta.token_ids)
        self._take_logprobs(delta)
        if delta.cached_tokens is not None and not delta.index:
            assert self.cached is None, f"{name} was told its cached tokens twice"
            self.cached = delta.cached_tokens
        if delta.stages is not None:
            assert self.stages is None, f"{name}: its transfers were reported twice"
            self.stages = delta.stages
        assert (delta.usage is None) == (delta.finish is None), f"{name}: usage comes with an end: {delta}"
        if delta.usage is not None:
            self.usage[delta.index] = delta.usage
            counted = (len(self.request.token_ids), self.num_before(delta.index) + len(tokens))
            assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == counted, f"{name}: {delta}"
        if delta.finish is not None:
            self.finishes[delta.index] = delta.finish
            self.stop_reasons[delta.index] = delta.stop_reason

    def _take_logprobs(self, delta: Delta) -> None:
        name = self.request.request_id
        if self.request.sampling.logprobs is None:
            assert delta.logprobs is None, f"{name} did not ask for logprobs"
        else:
            told = delta.logprobs or ()
            assert tuple(entry.token_id for entry in told) == delta.token_ids, f"{name}: {delta}"
            self.logprobs.setdefault(delta.index, []).extend(told)
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, f"{name} got its prompt's logprobs twice"
            self.prompt_logprobs = delta.prompt_logprobs


class Run:
    """A started engine and all that came out of it."""

    def __init__(self, engine: Engine, info: EngineInfo, harness: Harness) -> None:
        self.engine = engine
        self.info = info
        self.load = WorkerLoad()
        self.num_steps = 0
        self.replica = Replica()
        """The engine's blocks by what it has told of them."""
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
        """`variant`s below the length of the prompt have other tokens at its start."""
        ids = self.harness.prompt(prompt)
        return Request(
            request_id=RequestId(name),
            model=self.info.model,
            token_ids=ids[variant:] + ids[:variant],
            stop=StopConditions(max_tokens=tokens, ignore_eos=True),
            sampling=Sampling(seed=seed, num_choices=choices),
        )

    def short_request(self, name: str, *, tokens: int = 100, choices: int = 1) -> Request:
        """One whose answer ends by EOS."""
        return Request(
            request_id=RequestId(name),
            model=self.info.model,
            token_ids=self.harness.ending_prompt(),
            stop=StopConditions(max_tokens=tokens),
            sampling=Sampling(seed=1, num_choices=choices),
        )

    def submit(self, request: Request, *, may_fail: bool = False) -> Answer:
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
                f"after {self._deadline_s:g} s and {self.num_steps} steps what must happen has not; open: "
                f"{', '.join(name for name, answer in self._answers.items() if answer.is_open) or 'nothing'}"
            ) from None

    async def settle(self) -> None:
        """Until what the engine did before is told."""
        settle_s = float(getattr(self.harness, "settle_s", 0.0))
        if settle_s:
            await asyncio.sleep(settle_s)

    async def advance(self, num_steps: int) -> None:
        wanted = self.num_steps + num_steps
        await self.until(lambda: self.num_steps >= wanted)

    async def finish(self, *answers: Answer) -> None:
        await self.until(lambda: all(answer.done for answer in answers))

    async def answer(self, request: Request) -> Answer:
        answer = self.submit(request)
        await self.finish(answer)
        return answer

    async def assert_empty(self) -> None:
        """A request that runs alone and ends leaves an engine with nothing in it."""
        await self.answer(self.request(f"probe-{self.num_steps}", tokens=3))
        load = self.load
        left = (load.running, load.waiting, load.kv_used_blocks)
        assert left == (0, 0, 0), f"running, waiting, blocks in use: {left}"

    async def read(self) -> None:
        async for step in self.engine.steps():
            self._check_plain(step)
            for request_id, delta in step.deltas:
                self._answers[request_id].take(delta)
            for request_id, token in zip(step.plain_ids, step.plain_tokens, strict=True):
                self._answers[request_id].take(plain_delta(token))
            for request_id, failure in step.failed:
                answer = self._answers[request_id]
                assert answer.may_fail, f"{request_id} failed for no reason: {failure}"
                answer.error = failure
            for change in step.kv_changes:
                self.replica.apply(change)
            if step.load is not None:
                self.load = step.load
            self.num_steps += 1
            self._step.set()

    def _check_plain(self, step: StepOutput) -> None:
        """Plain means one token of a request's only choice, and nothing else in this step."""
        plain = set(step.plain_ids)
        assert len(plain) == len(step.plain_ids) == len(step.plain_tokens), "plain ids and tokens differ"
        both = plain.intersection(request_id for request_id, _ in step.deltas)
        assert not both, f"a plain token and a delta in one step: {sorted(both)}"


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
            # Leaving the scope waits for `steps` to end: an engine that goes on is found here.
