"""What every engine must do, as cases for any implementation and any loop. This is the core tier.

A case is an async function of a `Harness`; it raises AssertionError when the engine is wrong. With pytest:

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    async def test_conformance(case):
        await case(MyHarness())

Cases close every engine they start. Whatever a case is about, each step it sees is held against the
contract: order, one end per request, plain tokens that agree with the deltas.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Delta, FinishReason, StepOutput, Usage, plain_delta
from kvolt.core.errors import InvalidRequest, Overloaded, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.engines.contract import Engine
from kvolt.runtime.tasks import Scope

_DEADLINE_S = 30.0
_NUM_CONCURRENT = 200


class Harness(Protocol):
    """What a case needs of an implementation. The cases fit a context of 256 tokens."""

    def engine(self) -> Engine:
        """A new engine, not started, for the running loop. It can hold 200 requests, running or waiting."""
        ...

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens that the model takes; a longer prompt begins with the shorter ones."""
        ...


@dataclass(slots=True)
class _Answer:
    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)
    stopped: bool = False
    """Aborted or withdrawn: nothing may come any more."""

    @property
    def done(self) -> bool:
        return len(self.finishes) == self.request.sampling.num_choices

    def take(self, delta: Delta) -> None:
        name = self.request.request_id
        assert not self.stopped, f"{name} got {delta} after it was stopped"
        assert 0 <= delta.index < self.request.sampling.num_choices, f"{name} has no choice {delta.index}"
        assert delta.index not in self.finishes, f"{name} got {delta} after its end"
        self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.usage is not None:
            self.usage[delta.index] = delta.usage
        if delta.finish is not None:
            self.finishes[delta.index] = delta.finish


class _Run:
    """A started engine and all that came out of it."""

    def __init__(self, engine: Engine, info: EngineInfo, harness: Harness) -> None:
        self.engine = engine
        self.info = info
        self.load = WorkerLoad()
        self.num_steps = 0
        self._harness = harness
        self._answers: dict[RequestId, _Answer] = {}
        self._step = asyncio.Event()

    def request(
        self, name: str, *, prompt: int = 20, tokens: int = 8, seed: int = 1, choices: int = 1
    ) -> Request:
        return Request(
            request_id=RequestId(name),
            model=self.info.model,
            token_ids=self._harness.prompt(prompt),
            stop=StopConditions(max_tokens=tokens, ignore_eos=True),
            sampling=Sampling(seed=seed, num_choices=choices),
        )

    def submit(self, request: Request) -> _Answer:
        self.engine.submit(request)
        answer = self._answers[request.request_id] = _Answer(request)
        return answer

    def abort(self, answer: _Answer) -> None:
        answer.stopped = True
        self.engine.abort(answer.request.request_id)

    async def withdraw(self, answer: _Answer) -> bool:
        answer.stopped = await self.engine.withdraw(answer.request.request_id)
        return answer.stopped

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(_DEADLINE_S):
            while not condition():
                self._step.clear()
                await self._step.wait()

    async def advance(self, num_steps: int) -> None:
        wanted = self.num_steps + num_steps
        await self.until(lambda: self.num_steps >= wanted)

    async def finish(self, *answers: _Answer) -> None:
        await self.until(lambda: all(answer.done for answer in answers))

    async def answer(self, request: Request) -> _Answer:
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
            assert not step.failed, f"failed for no reason: {step.failed}"
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


@asynccontextmanager
async def _running(harness: Harness) -> AsyncIterator[_Run]:
    engine = harness.engine()
    async with asyncio.timeout(_DEADLINE_S):
        info = await engine.start()
    async with Scope("engine") as scope:
        run = _Run(engine, info, harness)
        scope.start(run.read(), "steps")
        try:
            yield run
        finally:
            await engine.close()
            # Leaving the scope waits for `steps` to end: an engine that goes on is found here.


async def info_agrees_with_the_card(harness: Harness) -> None:
    async with _running(harness) as run:
        card = run.engine.card
        assert (run.info.model, run.info.block_size) == (card.name, card.block_size)
        assert run.info.capacity.max_num_seqs >= 1


async def streams_in_order_and_stops_at_max_tokens(harness: Harness) -> None:
    async with _running(harness) as run:
        for num_tokens in (1, 2, 17):
            answer = await run.answer(run.request(f"r{num_tokens}", tokens=num_tokens))
            assert len(answer.tokens[0]) == num_tokens
            assert answer.finishes == {0: FinishReason.LENGTH}
            usage = answer.usage[0]
            assert (usage.prompt_tokens, usage.completion_tokens) == (20, num_tokens)


async def tokens_come_while_it_computes(harness: Harness) -> None:
    async with _running(harness) as run:
        answer = run.submit(run.request("r", tokens=32))
        await run.until(lambda: bool(answer.tokens))
        assert not answer.done, "the first token came together with the last"
        await run.finish(answer)


async def same_seed_same_tokens(harness: Harness) -> None:
    async with _running(harness) as run:
        alone = await run.answer(run.request("alone", tokens=16, seed=7))
        among = [run.submit(run.request(f"r{i}", tokens=16, seed=7 + i % 2, prompt=20)) for i in range(6)]
        await run.finish(*among)
        for index, answer in enumerate(among):
            assert (answer.tokens == alone.tokens) == (index % 2 == 0)


async def resumes_as_if_nothing_happened(harness: Harness) -> None:
    async with _running(harness) as run:
        request = run.request("whole", tokens=9, seed=3)
        whole = (await run.answer(request)).tokens[0]
        for cut in range(1, len(whole)):
            moved = replace(request, request_id=RequestId(f"cut{cut}"), resume=tuple(whole[:cut]))
            answer = await run.answer(moved)
            assert whole[:cut] + answer.tokens[0] == whole
            assert answer.usage[0].completion_tokens == len(whole)


async def every_choice_ends(harness: Harness) -> None:
    async with _running(harness) as run:
        answer = await run.answer(run.request("r", choices=3, tokens=6))
        assert {index: len(tokens) for index, tokens in answer.tokens.items()} == {0: 6, 1: 6, 2: 6}
        assert len({tuple(tokens) for tokens in answer.tokens.values()}) > 1, "all choices are the same"


async def abort_frees_everything(harness: Harness) -> None:
    """At every step of a request's life, while another one goes on undisturbed."""
    async with _running(harness) as run:
        expected = (await run.answer(run.request("expected", tokens=40))).tokens
        for num_steps in range(8):
            stays = run.submit(run.request(f"stays{num_steps}", tokens=40))
            goes = run.submit(run.request(f"goes{num_steps}", prompt=60, tokens=40, choices=2, seed=5))
            await run.advance(num_steps)
            run.abort(goes)
            run.abort(goes)
            await run.finish(stays)
            assert stays.tokens == expected
            assert not goes.done
        await run.assert_empty()


async def aborting_the_unknown_is_no_error(harness: Harness) -> None:
    async with _running(harness) as run:
        run.engine.abort(RequestId("nobody"))
        ended = await run.answer(run.request("ended"))
        run.engine.abort(ended.request.request_id)
        await run.assert_empty()


async def withdraws_only_what_has_not_started(harness: Harness) -> None:
    async with _running(harness) as run:
        running = [run.submit(run.request(f"r{i}", tokens=12)) for i in range(run.info.capacity.max_num_seqs)]
        await run.until(lambda: any(answer.tokens for answer in running))
        waiting = run.submit(run.request("waiting"))
        started = next(answer for answer in running if answer.tokens)
        assert await run.withdraw(waiting), "a request that waits was not given back"
        assert not await run.withdraw(started), "a request that had tokens was given back"
        assert not await run.engine.withdraw(RequestId("nobody"))
        await run.finish(*running)
        assert not waiting.tokens
        await run.assert_empty()


async def two_hundred_at_once(harness: Harness) -> None:
    async with _running(harness) as run:
        answers = [
            run.submit(run.request(f"r{i}", prompt=1 + i % 50, tokens=1 + i % 13, seed=i))
            for i in range(_NUM_CONCURRENT)
        ]
        await run.finish(*answers)
        for index, answer in enumerate(answers):
            assert len(answer.tokens[0]) == 1 + index % 13
        await run.assert_empty()


async def refuses_bad_requests(harness: Harness) -> None:
    """By `submit`, with an error that says what is wrong; nothing of them stays."""
    async with _running(harness) as run:
        good = run.request("r")
        no_prompt = replace(good, token_ids=())
        bad = [
            no_prompt,
            replace(good, stop=replace(good.stop, max_tokens=0)),
            replace(good, stop=replace(good.stop, max_tokens=run.engine.card.context_length)),
            replace(good, sampling=replace(good.sampling, num_choices=0)),
            replace(good, resume=harness.prompt(good.stop.max_tokens)),
            replace(good, stop=replace(good.stop, max_tokens=-1)),
        ]
        for request in bad:
            _assert_refused(run.engine, request)
        answer = run.submit(good)
        _assert_refused(run.engine, good)  # a second one with its id
        await run.finish(answer)
        assert len(answer.tokens[0]) == good.stop.max_tokens
        await run.assert_empty()


def _assert_refused(engine: Engine, request: Request) -> None:
    try:
        engine.submit(request)
    except (InvalidRequest, Unsupported):
        return
    except Overloaded as error:
        raise AssertionError(f"no other time is better for {request}") from error
    raise AssertionError(f"taken: {request}")


async def an_id_can_be_used_again(harness: Harness) -> None:
    async with _running(harness) as run:
        first = (await run.answer(run.request("same", tokens=20))).tokens
        answer = run.submit(run.request("same", tokens=20))
        await run.until(lambda: bool(answer.tokens))
        run.abort(answer)
        again = await run.answer(run.request("same", tokens=20))
        assert again.tokens == first


async def close_ends_the_steps(harness: Harness) -> None:
    """With requests inside, and twice."""
    async with _running(harness) as run:
        answer = run.submit(run.request("r", tokens=100))
        await run.until(lambda: bool(answer.tokens))
        await run.engine.close()


CASES: tuple[Callable[[Harness], Awaitable[None]], ...] = (
    info_agrees_with_the_card,
    streams_in_order_and_stops_at_max_tokens,
    tokens_come_while_it_computes,
    same_seed_same_tokens,
    resumes_as_if_nothing_happened,
    every_choice_ends,
    abort_frees_everything,
    aborting_the_unknown_is_no_error,
    withdraws_only_what_has_not_started,
    two_hundred_at_once,
    refuses_bad_requests,
    an_id_can_be_used_again,
    close_ends_the_steps,
)
