"""The sim engine's own rules: what a step costs, who runs when blocks are short, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import is_empty, make_request, sim
from tokenizers import Tokenizer

from kvolt.core.card import card_hash
from kvolt.core.delta import Delta, StepOutput
from kvolt.core.errors import Cancelled, EngineFailed, InvalidRequest, NotFound, Overloaded, Unsupported
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats
from kvolt.core.request import Grammar, GrammarKind, Handoff, Request, RoutingHints
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.runtime.tasks import Scope
from kvolt.scheduler.step_plan import Scheduling
from kvolt.testing import run_virtual

STEP = LatencyModel(base_s=1.0)


class Steps(list[tuple[float, StepOutput]]):
    """What came out of an engine, and when."""

    @property
    def stats(self) -> list[StepStats]:
        return [step.load.step for _, step in self if step.load is not None and step.load.step is not None]

    def deltas(self, name: str) -> list[Delta]:
        return [delta for _, step in self for request_id, delta in step.deltas if request_id == name]

    def tokens(self, name: str) -> list[int]:
        """Of the only choice."""
        found: list[int] = []
        for _, step in self:
            found += [
                token for each, token in zip(step.plain_ids, step.plain_tokens, strict=True) if each == name
            ]
            found += [token for each, delta in step.deltas if each == name for token in delta.token_ids]
        return found

    def ends(self) -> list[str]:
        return [name for _, step in self for name, delta in step.deltas if delta.finish is not None]


Body = Callable[[SimEngine, Steps], Coroutine[Any, Any, None]]


def run_engine(arguments: SimArguments, body: Body, reading_s: float = 0.0) -> None:
    """Run `body` beside a reader that notes each step with its time, and takes a time of its own over each."""

    async def main() -> None:
        engine = sim(arguments)
        steps = Steps()

        async def read() -> None:
            async for step in engine.steps():
                steps.append((asyncio.get_running_loop().time(), step))
                if reading_s:
                    await asyncio.sleep(reading_s)

        async with Scope("engine") as scope:
            scope.start(read(), "read")
            await body(engine, steps)
            await engine.close()
            engine._scheduler.check_integrity()

    run_virtual(main)


# --- time


def test_steps_take_what_the_latency_model_says() -> None:
    model = LatencyModel(
        base_s=1.0, prefill_token_s=0.5, prefill_context_s=0.001, batch_s=0.25, context_token_s=0.01
    )

    async def body(engine: SimEngine, steps: Steps) -> None:
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


def test_what_is_done_between_steps_is_a_part_of_the_next() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(make_request(tokens=3))
        await asyncio.sleep(60)
        assert [time for time, _ in steps] == pytest.approx([1.0, 2.0, 3.0])
        engine.submit(make_request(tokens=2))  # begins now, not where the last one ended
        await asyncio.sleep(60)
        assert [time for time, _ in steps[3:]] == pytest.approx([61.0, 62.0])

    run_engine(SimArguments(latency=STEP), body, reading_s=0.3)


def test_a_reader_who_is_slower_than_the_steps_is_never_caught_up_with() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(make_request(tokens=4))
        await asyncio.sleep(60)
        assert [time for time, _ in steps] == pytest.approx([1.0, 2.5, 4.0, 5.5])

    run_engine(SimArguments(latency=STEP), body, reading_s=1.5)


def test_speed_divides_the_time_of_a_step() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(make_request(tokens=1))
        await asyncio.sleep(60)
        assert [time for time, _ in steps] == pytest.approx([0.25])

    run_engine(SimArguments(speed=4, latency=STEP), body)


def test_with_sglang_scheduling_others_wait_for_a_long_prompt() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(make_request("short", prompt=5, tokens=20))
        await asyncio.sleep(1.5)
        engine.submit(make_request("long", prompt=25, tokens=2))
        await asyncio.sleep(60)
        made = [(part.batch, part.prefill_tokens) for part in steps.stats]
        assert made[:7] == [(0, 5), (1, 0), (0, 10), (0, 10), (0, 5), (2, 0), (1, 0)]

    sglang = Scheduling.SGLANG
    run_engine(SimArguments(max_num_seqs=8, max_batch_tokens=10, latency=STEP, scheduling=sglang), body)


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(make_request("short", prompt=5, tokens=20))
        await asyncio.sleep(1.5)
        engine.submit(make_request("long", prompt=25, tokens=2))
        await asyncio.sleep(60)
        assert [part.prefill_tokens for part in steps.stats][:6] == [5, 0, 9, 9, 7, 0]
        plain = [step.plain_ids for _, step in steps]
        assert plain[1:4] == [("short",)] * 3

    run_engine(SimArguments(max_num_seqs=8, max_batch_tokens=10, latency=STEP), body)


def test_a_prompt_that_is_cached_costs_no_time_but_its_last_tokens() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        for name in ("first", "second"):
            engine.submit(make_request(name, prompt=70, tokens=1))
            await asyncio.sleep(200)
        assert [part.prefill_tokens for part in steps.stats] == [70, 6]
        assert [time for time, _ in steps] == pytest.approx([71, 207])
        (told,) = steps.deltas("second")
        assert told.usage is not None
        assert (told.cached_tokens, told.usage.cached_tokens) == (64, 64)

    run_engine(SimArguments(latency=LatencyModel(base_s=1.0, prefill_token_s=1.0)), body)


def test_a_batch_that_stays_the_same_is_the_same_object() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(make_request("a", tokens=10))
        engine.submit(make_request("b", tokens=10))
        await asyncio.sleep(60)
        plain = [step.plain_ids for _, step in steps if step.plain_ids]
        assert len(plain) == 8
        assert all(ids is plain[0] for ids in plain)

    run_engine(SimArguments(latency=STEP), body)


# --- who runs


def test_choices_share_the_blocks_of_the_prompt_and_end_apart() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        request = make_request(tokens=10, choices=2)
        prompt = Tokenizer.from_buffer(engine.card.tokenizer_json).encode("<say>a<or/>four</say>").ids
        num_shared = (len(prompt) - 1) // 16 * 16
        engine.submit(replace(request, token_ids=tuple(prompt)))
        await asyncio.sleep(60)
        stats = steps.stats
        assert [part.prefill_tokens for part in stats][:3] == [len(prompt), len(prompt) - num_shared, 0]
        assert [part.batch for part in stats] == [0, 1, 1, 1, 1, 1]
        assert [part.context_tokens for part in stats][2:] == [len(prompt) + n for n in range(1, 5)]
        cached = {
            delta.index: delta.cached_tokens for delta in steps.deltas("r") if delta.cached_tokens is not None
        }
        assert cached == {0: 0, 1: num_shared}
        assert is_empty(engine)

    run_engine(SimArguments(answer_from_prompt=True, latency=STEP), body)


def test_first_come_first_served_when_blocks_are_short() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(make_request("first", prompt=50, tokens=14))  # 4 of 5 blocks
        engine.submit(make_request("second", prompt=20, tokens=10))  # 2
        engine.submit(make_request("third", prompt=1, tokens=1))  # 1: would fit, but it is not its turn
        await asyncio.sleep(5.5)
        assert (engine.load().running, engine.load().waiting) == (1, 2)
        await asyncio.sleep(60)
        assert steps.ends() == ["first", "third", "second"]
        assert is_empty(engine)

    run_engine(SimArguments(kv_blocks=5, latency=STEP), body)


def test_a_higher_priority_goes_first() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        for name, priority in (("a", 0), ("b", 0), ("c", 1)):
            engine.submit(replace(make_request(name, tokens=3), routing=RoutingHints(priority=priority)))
        await asyncio.sleep(60)
        assert steps.ends() == ["c", "a", "b"]

    run_engine(SimArguments(max_num_seqs=1, latency=STEP), body)


def test_who_is_preempted_says_the_same_as_alone() -> None:
    requests = [make_request(f"r{seed}", prompt=30, tokens=60, seed=seed) for seed in range(3)]

    async def alone(engine: SimEngine, steps: Steps) -> None:
        for request in requests:
            engine.submit(request)
            await asyncio.sleep(100)
        expected.update({request.request_id: steps.tokens(request.request_id) for request in requests})

    async def crowded(engine: SimEngine, steps: Steps) -> None:
        for request in requests:
            engine.submit(request)
        await asyncio.sleep(500)
        assert engine._scheduler.planner.num_preemptions > 0
        assert {request.request_id: steps.tokens(request.request_id) for request in requests} == expected
        for request in requests:
            told = [delta.cached_tokens for delta in steps.deltas(request.request_id)]
            assert [cached is None for cached in told].count(False) == 1, "told twice, or not at all"

    expected: dict[str, list[int]] = {}
    run_engine(SimArguments(latency=STEP), alone)
    assert {len(tokens) for tokens in expected.values()} == {60}
    run_engine(SimArguments(kv_blocks=8, latency=STEP), crowded)


# --- what is refused


def _handed_over(*first_tokens: int) -> Handoff:
    return Handoff(ticket=b"", prefill_instance=InstanceId(""), first_tokens=first_tokens)


BAD: list[tuple[Request, type[Exception], str]] = [
    (replace(make_request(), grammar=Grammar(GrammarKind.REGEX, "a")), Unsupported, "feature"),
    (make_request(prompt=0), InvalidRequest, "param"),
    (make_request(tokens=0), InvalidRequest, "param"),
    (make_request(prompt=97, tokens=4), InvalidRequest, "param"),  # 101 of 100
    (make_request(prompt=60, tokens=22), InvalidRequest, "param"),  # 6 blocks of 5
    (make_request(choices=0), InvalidRequest, "param"),
    (replace(make_request(tokens=2), prior_tokens=(5, 6)), InvalidRequest, "param"),
    (replace(make_request(), prior_tokens=(-1,)), InvalidRequest, "param"),
    (replace(make_request(), handoff=_handed_over(2**32)), InvalidRequest, "param"),
    (
        replace(make_request(), token_ids=(2**32,), sampling=replace(make_request().sampling, seed=None)),
        InvalidRequest,
        "param",
    ),
]


@pytest.mark.parametrize(("request_", "error", "field"), BAD)
def test_what_can_never_run_is_refused(request_: Request, error: type[Exception], field: str) -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        with pytest.raises(error) as caught:
            engine.submit(request_)
        assert field in caught.value.fields  # type: ignore[attr-defined]
        assert is_empty(engine)
        engine.submit(make_request(prompt=60, tokens=21))  # the most that fits
        await asyncio.sleep(60)
        assert steps.ends() == ["r"]

    run_engine(SimArguments(context_length=100, kv_blocks=5), body)


def test_a_step_must_have_room_for_all_sequences() -> None:
    SimArguments(max_num_seqs=8, max_batch_tokens=8)
    with pytest.raises(
        ValueError, match="max_batch_tokens is 8; it must be max_num_seqs, which is 9, or more"
    ):
        SimArguments(max_num_seqs=9, max_batch_tokens=8)


def test_a_full_queue_is_overloaded_until_something_leaves_it() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        for name in ("a", "b"):
            engine.submit(make_request(name))
        with pytest.raises(Overloaded) as caught:
            engine.submit(make_request("c"))
        assert caught.value.fields["limit"] == 2
        assert await engine.withdraw(RequestId("a"))
        engine.submit(make_request("c"))

    run_engine(SimArguments(max_waiting=2), body)


# --- the rest


def test_close_frees_everything() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(make_request(tokens=400))
        await asyncio.sleep(0.1)
        assert not is_empty(engine)
        await engine.close()
        assert is_empty(engine)
        with pytest.raises(EngineFailed):
            engine.submit(make_request("late"))

    run_engine(SimArguments(), body)


def test_blocks_of_a_prompt_are_reported_when_their_step_ends() -> None:
    """And those that are cached when the first begins; a second each."""
    arguments = SimArguments(latency=STEP, max_batch_tokens=32, max_num_seqs=4, block_size=16)

    async def body(engine: SimEngine, steps: Steps) -> None:
        asked = make_request("a", prompt=100, tokens=2)
        engine.submit(replace(asked, request_id=RequestId("start"), token_ids=asked.token_ids[:17]))
        await asyncio.sleep(2.5)
        now = asyncio.get_running_loop().time
        async with Scope("prefill") as scope:
            scope.start(engine.prefill(asked), "prefill")
            began_at = now()
            await asyncio.sleep(0)
            told: list[tuple[float, int]] = []
            for _ in range(4):
                held = await engine.computed_kv(RequestId("a"), told[-1][1] if told else 0)
                told.append((now() - began_at, len(held.blocks)))
        assert [count for _, count in told] == [1, 3, 5, 6]
        assert [at for at, _ in told] == pytest.approx([0.0, 1.0, 2.0, 3.0])

    run_engine(arguments, body)


def test_what_others_read_of_an_aborted_prompt_goes_when_a_handoff_would() -> None:
    arguments = SimArguments(latency=STEP, max_batch_tokens=32, max_num_seqs=4, block_size=16, hold_s=5.0)

    async def body(engine: SimEngine, steps: Steps) -> None:
        async with Scope("prefill") as scope:
            computing = scope.start(_error_of(engine.prefill(make_request("a", prompt=100))), "prefill")
            await asyncio.sleep(0)
            assert len((await engine.computed_kv(RequestId("a"), 0)).blocks) == 2
            waiting = scope.start(_error_of(engine.computed_kv(RequestId("a"), 2)), "blocks")
            await asyncio.sleep(0.1)
            engine.abort(RequestId("a"))
        assert isinstance(computing.result(), Cancelled)
        assert isinstance(waiting.result(), NotFound)
        await asyncio.sleep(4.5)
        assert engine._scheduler.pool.num_used == 2
        await asyncio.sleep(1.0)
        assert engine._scheduler.pool.num_used == 0

    run_engine(arguments, body)


async def _error_of(call: Coroutine[Any, Any, object]) -> Exception | None:
    try:
        await call
    except Exception as error:
        return error
    return None


def test_without_a_seed_the_prompt_decides() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        for name, prompt in (("a", 20), ("b", 20), ("c", 21)):
            request = make_request(name, prompt=prompt, tokens=6)
            engine.submit(replace(request, sampling=replace(request.sampling, seed=None)))
        await asyncio.sleep(60)
        assert steps.tokens("a") == steps.tokens("b") != steps.tokens("c")

    run_engine(SimArguments(), body)


async def test_two_engines_of_one_model_have_one_card() -> None:
    one, other = await sim().start(), await sim().start()
    assert one == other
    assert one.card == card_hash(sim().card)
    assert (await sim(SimArguments(block_size=32)).start()).card != one.card
