"""The sim engine's own rules: what a step costs, who is admitted, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import is_empty, make_request, sim
from tokenizers import Tokenizer

from kvolt.core.card import card_hash
from kvolt.core.delta import StepOutput
from kvolt.core.errors import InvalidRequest, Overloaded, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Grammar, GrammarKind, Request
from kvolt.engines.sim import SimArguments, SimEngine
from kvolt.runtime.tasks import Scope
from kvolt.testing import run_virtual

Body = Callable[[SimEngine, list[tuple[float, StepOutput]]], Coroutine[Any, Any, None]]


def run_engine(arguments: SimArguments, body: Body) -> None:
    """Run `body` beside a reader that notes each step with its time."""

    async def main() -> None:
        engine = sim(arguments)
        steps: list[tuple[float, StepOutput]] = []

        async def read() -> None:
            async for step in engine.steps():
                steps.append((asyncio.get_running_loop().time(), step))

        async with Scope("engine") as scope:
            scope.start(read(), "read")
            await body(engine, steps)
            await engine.close()

    run_virtual(main)


def test_steps_take_what_the_latency_model_says() -> None:
    model = LatencyModel(
        base_s=1.0, prefill_token_s=0.5, prefill_context_s=0.001, batch_s=0.25, context_token_s=0.01
    )

    async def body(engine: SimEngine, steps: list[tuple[float, StepOutput]]) -> None:
        engine.submit(make_request(prompt=20, tokens=3))
        await asyncio.sleep(60)
        prefill = 1 + 20 * 0.5 + 20 * 20 * 0.001
        decode = 1 + 0.25 + 21 * 0.01
        times = [time for time, _ in steps]
        assert times == pytest.approx([prefill, prefill + decode, prefill + 2 * decode + 0.01])
        for (time, step), before in zip(steps, [0.0, *times], strict=False):
            assert step.load is not None
            assert step.load.step is not None
            assert step.load.step.time_s == pytest.approx(time - before)

    run_engine(SimArguments(latency=model), body)


def test_speed_divides_the_time_of_a_step() -> None:
    async def body(engine: SimEngine, steps: list[tuple[float, StepOutput]]) -> None:
        engine.submit(make_request(tokens=1))
        await asyncio.sleep(60)
        assert [time for time, _ in steps] == pytest.approx([0.25])

    run_engine(SimArguments(speed=4, latency=LatencyModel(base_s=1.0)), body)


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    async def body(engine: SimEngine, steps: list[tuple[float, StepOutput]]) -> None:
        engine.submit(make_request("short", prompt=5, tokens=20))
        await asyncio.sleep(1.5)
        engine.submit(make_request("long", prompt=25, tokens=2))
        await asyncio.sleep(60)
        stats = [step.load.step for _, step in steps if step.load is not None]
        assert [part.prefill_tokens for part in stats if part is not None][:6] == [5, 0, 9, 9, 7, 0]
        plain = [step.plain_ids for _, step in steps]
        assert plain[1:4] == [("short",)] * 3

    run_engine(SimArguments(max_batch_tokens=10, latency=LatencyModel(base_s=1.0)), body)


def test_a_batch_that_stays_the_same_is_the_same_object() -> None:
    async def body(engine: SimEngine, steps: list[tuple[float, StepOutput]]) -> None:
        engine.submit(make_request("a", tokens=10))
        engine.submit(make_request("b", tokens=10))
        await asyncio.sleep(60)
        plain = [step.plain_ids for _, step in steps if step.plain_ids]
        assert len(plain) == 8
        assert all(ids is plain[0] for ids in plain)

    run_engine(SimArguments(latency=LatencyModel(base_s=1.0)), body)


def test_a_choice_that_has_ended_costs_nothing_and_its_blocks_go_with_the_last() -> None:
    async def body(engine: SimEngine, steps: list[tuple[float, StepOutput]]) -> None:
        request = make_request(tokens=10, choices=2)
        prompt = Tokenizer.from_buffer(engine.card.tokenizer_json).encode("<say>a<or/>four</say>").ids
        engine.submit(replace(request, token_ids=tuple(prompt)))
        await asyncio.sleep(60)
        loads = [step.load for _, step in steps if step.load is not None]
        stats = [load.step for load in loads if load.step is not None]
        assert [part.batch for part in stats] == [0, 2, 1, 1, 1]
        assert [part.context_tokens for part in stats][1:4] == [
            2 * len(prompt) + 2,
            *(len(prompt) + n for n in (2, 3)),
        ]
        assert len({load.kv_used_blocks for load in loads[:-1]}) == 1
        assert is_empty(engine)

    run_engine(SimArguments(say_from_prompt=True, latency=LatencyModel(base_s=1.0)), body)


def test_first_come_first_served_when_blocks_are_short() -> None:
    async def body(engine: SimEngine, steps: list[tuple[float, StepOutput]]) -> None:
        engine.submit(make_request("first", prompt=50, tokens=14))  # 4 of 5 blocks
        engine.submit(make_request("second", prompt=20, tokens=10))  # 2
        engine.submit(make_request("third", prompt=1, tokens=1))  # 1: would fit, but it is not its turn
        await asyncio.sleep(5.5)
        assert list(engine._running) == ["first"]
        await asyncio.sleep(10)
        assert is_empty(engine) or list(engine._running) == ["second"]
        await asyncio.sleep(60)
        ends = [name for _, step in steps for name, delta in step.deltas if delta.finish is not None]
        assert ends == ["first", "third", "second"]
        assert is_empty(engine)

    run_engine(SimArguments(kv_blocks=5, latency=LatencyModel(base_s=1.0)), body)


BAD: list[tuple[Request, type[Exception], str]] = [
    (replace(make_request(), grammar=Grammar(GrammarKind.REGEX, "a")), Unsupported, "feature"),
    (make_request(prompt=0), InvalidRequest, "param"),
    (make_request(tokens=0), InvalidRequest, "param"),
    (make_request(prompt=60, tokens=5), InvalidRequest, "param"),  # 65 of 64
    (make_request(choices=0), InvalidRequest, "param"),
    (make_request(choices=5, tokens=12), InvalidRequest, "param"),  # 10 blocks of 8
    (replace(make_request(tokens=2), resume=(5, 6)), InvalidRequest, "param"),
    (
        replace(make_request(), token_ids=(2**32,), sampling=replace(make_request().sampling, seed=None)),
        InvalidRequest,
        "param",
    ),
]


@pytest.mark.parametrize(("request_", "error", "field"), BAD)
def test_what_can_never_run_is_refused(request_: Request, error: type[Exception], field: str) -> None:
    async def body(engine: SimEngine, steps: list[tuple[float, StepOutput]]) -> None:
        with pytest.raises(error) as caught:
            engine.submit(request_)
        assert field in caught.value.fields  # type: ignore[attr-defined]
        assert is_empty(engine)
        engine.submit(make_request(prompt=60, tokens=4))  # the most that fits

    run_engine(SimArguments(context_length=64, kv_blocks=8), body)


def test_a_full_queue_is_overloaded_until_something_leaves_it() -> None:
    async def body(engine: SimEngine, steps: list[tuple[float, StepOutput]]) -> None:
        for name in ("a", "b"):
            engine.submit(make_request(name))
        with pytest.raises(Overloaded) as caught:
            engine.submit(make_request("c"))
        assert caught.value.fields["limit"] == 2
        assert await engine.withdraw(RequestId("a"))
        engine.submit(make_request("c"))

    run_engine(SimArguments(max_waiting=2), body)


def test_close_frees_everything() -> None:
    async def body(engine: SimEngine, steps: list[tuple[float, StepOutput]]) -> None:
        engine.submit(make_request(tokens=400))
        await asyncio.sleep(0.1)
        assert not is_empty(engine)
        await engine.close()
        assert is_empty(engine)

    run_engine(SimArguments(), body)


def test_without_a_seed_the_prompt_decides() -> None:
    async def body(engine: SimEngine, steps: list[tuple[float, StepOutput]]) -> None:
        for name, prompt in (("a", 20), ("b", 20), ("c", 21)):
            request = make_request(name, prompt=prompt, tokens=6)
            engine.submit(replace(request, sampling=replace(request.sampling, seed=None)))
        await asyncio.sleep(60)
        tokens: dict[str, list[int]] = {"a": [], "b": [], "c": []}
        for _, step in steps:
            for name, delta in step.deltas:
                tokens[name] += delta.token_ids
            for name, token in zip(step.plain_ids, step.plain_tokens, strict=True):
                tokens[name].append(token)
        assert tokens["a"] == tokens["b"] != tokens["c"]

    run_engine(SimArguments(), body)


async def test_two_engines_of_one_model_have_one_card() -> None:
    one, other = await sim().start(), await sim().start()
    assert one == other
    assert one.card == card_hash(sim().card)
    assert (await sim(SimArguments(block_size=32)).start()).card != one.card
