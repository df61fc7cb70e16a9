"""Large requests are worked on off the loop, one at a time; small ones on it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.engines.lab import ARGUMENTS, MODEL, Frontend, Lab, RunningWorker, sim
from tests.unit.frontend.serving import served

from kvolt.core.errors import Overloaded
from kvolt.engines.sim.engine import SimArguments
from kvolt.frontend import off_loop
from kvolt.frontend.off_loop import OffLoop
from kvolt.frontend.openai_api.decoding import SMALL_BODY_BYTES
from kvolt.runtime.clock import ThreadBlocking
from kvolt.testing import InlineBlocking, run_virtual


def test_the_loop_ticks_while_a_large_request_is_parsed() -> None:
    ticks = 0

    def work() -> int:
        """Pure Python, as validation is: it ends when the loop has run ten times."""
        last = ticks + 10
        while ticks < last and not stop.is_set():
            pass
        return ticks

    async def scenario() -> None:
        nonlocal ticks
        blocking = ThreadBlocking(1)
        running = asyncio.ensure_future(OffLoop(blocking).run(work))
        try:
            while not running.done():
                ticks += 1
                await asyncio.sleep(0)
            assert running.result() >= 10
        finally:
            stop.set()
            blocking.close()

    stop = threading.Event()
    asyncio.run(scenario())


def test_large_requests_take_turns() -> None:
    class Watched(InlineBlocking):
        running = most = 0

        async def run(self, call: Callable[[], Any], timeout_s: float) -> Any:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                return await super().run(call, timeout_s)
            finally:
                self.running -= 1

    async def scenario() -> None:
        blocking = Watched(latency_s=1.0)
        lane = OffLoop(blocking)
        order: list[int] = []
        await asyncio.gather(*(lane.run(lambda number=number: order.append(number)) for number in range(5)))
        assert (blocking.most, order) == (1, [0, 1, 2, 3, 4])

    run_virtual(scenario)


def test_parsed_requests_go_before_others_are_parsed() -> None:
    """Otherwise as many expanded bodies would be in memory as requests wait."""

    async def scenario() -> None:
        lane = OffLoop(InlineBlocking(latency_s=1.0))
        order: list[str] = []

        async def request(number: int) -> None:
            await lane.run_first(lambda: order.append(f"parse {number}"))
            await lane.run(lambda: order.append(f"check {number}"))

        await asyncio.gather(*map(request, range(4)))
        begun = [order.index(f"parse {number}") for number in range(4)]
        checked = [order.index(f"check {number}") for number in range(4)]
        assert all(check - parse <= 2 for parse, check in zip(begun, checked, strict=True)), order

    run_virtual(scenario)


def test_a_turn_is_passed_on_by_waiters_that_are_cancelled() -> None:
    async def scenario() -> None:
        lane = OffLoop(InlineBlocking(latency_s=1.0))
        calls = [asyncio.ensure_future(lane.run(lambda: None)) for _ in range(3)]
        firsts = [asyncio.ensure_future(lane.run_first(lambda: None)) for _ in range(3)]
        await asyncio.sleep(0.5)
        calls[1].cancel()  # waits
        firsts[0].cancel()
        await asyncio.sleep(0.5)  # the first has ended in this instant: the third has its turn
        calls[2].cancel()
        await asyncio.gather(*calls, *firsts, return_exceptions=True)
        assert [each.cancelled() for each in (*calls, *firsts)] == [False, True, True, True, False, False]
        async with asyncio.timeout(1.5):
            await lane.run(lambda: None)

    run_virtual(scenario)


def test_a_waiter_that_is_cancelled_as_a_call_ends_gets_no_turn() -> None:
    async def scenario() -> None:
        lane = OffLoop(InlineBlocking(latency_s=1.0))
        ended: list[int] = []

        def cancel_next() -> None:
            calls[1].cancel()

        calls = [asyncio.ensure_future(lane.run(cancel_next))]
        calls += [asyncio.ensure_future(lane.run(lambda: ended.append(1))) for _ in range(3)]
        await asyncio.gather(*calls, return_exceptions=True)
        assert calls[1].cancelled()
        assert len(ended) == 2
        async with asyncio.timeout(2.5):  # one at a time still
            await asyncio.gather(lane.run(lambda: None), lane.run(lambda: None))
            assert lane._num_free == 1

    run_virtual(scenario)


def test_calls_whose_clients_hang_up_run_one_at_a_time_and_leave_the_shared_threads_free() -> None:
    gate = threading.Event()
    started: list[int] = []

    def slow(number: int) -> None:
        started.append(number)
        gate.wait(20)

    async def scenario() -> None:
        blocking = ThreadBlocking(2)
        lane = OffLoop(blocking)
        try:
            for number in range(4):
                calling = asyncio.ensure_future(lane.run(lambda number=number: slow(number)))
                async with asyncio.timeout(20):
                    while not started:
                        await asyncio.sleep(0.001)
                await asyncio.sleep(0.02)
                calling.cancel()
                await asyncio.wait({calling})
            assert started == [0], "the others gave up before their turn"
            assert await blocking.run(lambda: "free", 20.0) == "free"
            gate.set()
            assert await lane.run(lambda: "next") == "next"
            assert started == [0]
        finally:
            gate.set()
            blocking.close()

    asyncio.run(scenario())


def test_too_many_waiting_are_refused_and_leave_room_when_they_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(off_loop, "_MAX_WAITING", 2)

    async def scenario() -> None:
        lane = OffLoop(InlineBlocking(latency_s=1.0))
        results = await asyncio.gather(*(lane.run(lambda: "done") for _ in range(4)), return_exceptions=True)
        assert results[:3] == ["done"] * 3, "one runs, two wait"
        assert isinstance(results[3], Overloaded)
        assert await lane.run(lambda: "done") == "done"

    run_virtual(scenario)


MANY = [{"role": "user", "content": "hi"}] * (SMALL_BODY_BYTES // 30)


@pytest.mark.parametrize(
    ("path", "small", "large"),
    [
        (
            "/v1/chat/completions",
            {"messages": MANY[:2], "max_tokens": 1},
            {"messages": MANY, "max_tokens": 1},
        ),
        ("/v1/completions", {"prompt": [7] * 9, "max_tokens": 1}, {"prompt": [7] * 40_000, "max_tokens": 1}),
        ("/tokenize", {"messages": MANY[:2]}, {"messages": MANY}),
        ("/tokenize", {"prompt": "hi"}, {"prompt": "hi " * 50_000}),
        ("/detokenize", {"tokens": [7] * 9}, {"tokens": [7] * 40_000}),
    ],
)
def test_only_large_bodies_leave_the_loop(
    path: str, small: dict[str, Any], large: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    run = OffLoop._run

    async def counted(self: OffLoop, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return await run(self, *arguments)

    monkeypatch.setattr(OffLoop, "_run", counted)

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        assert (await edge.ask(path, {"model": MODEL, **small})).status == 200
        assert calls == 0
        assert len(json.dumps(large)) > SMALL_BODY_BYTES
        assert (await edge.ask(path, {"model": MODEL, **large})).status == 200
        assert calls >= 2

    served(body, lambda: sim(SimArguments(context_length=100_000, latency=ARGUMENTS.latency)))


def test_an_answer_of_many_logprobs_is_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.frontend.generate.INLINE_LOGPROBS", 40)
    run, calls = OffLoop.run, []

    async def counted(self: OffLoop, call: Callable[[], Any]) -> Any:
        calls.append(call)
        return await run(self, call)

    monkeypatch.setattr(OffLoop, "run", counted)

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        few = await edge.chat(max_tokens=9, logprobs=True, top_logprobs=3, ignore_eos=True)
        assert (few.status, len(calls)) == (200, 0)
        many = await edge.chat(max_tokens=11, logprobs=True, top_logprobs=3, ignore_eos=True)
        assert (many.status, len(calls)) == (200, 1)
        assert len(many.json["choices"][0]["logprobs"]["content"]) == 11

    served(body)


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"chat_template_kwargs": {f"k{n}": 1 for n in range(1025)}}, "chat_template_kwargs", "1024"),
        ({"chat_template_args": {f"k{n}": 1 for n in range(1025)}}, "chat_template_args", "1024"),
        ({"documents": [{}] * 16_385}, "documents", "16384"),
        ({"metadata": {f"k{n}": 1 for n in range(257)}}, "metadata", "256"),
        ({"messages": [{"role": "user", "content": ""}] * 16_385}, "messages", "16384"),
        ({"tools": [{"function": {"name": "f"}}] * 1537}, "tools", "1536"),
        ({"stop": ["x"] * 33}, "stop", "32"),
        ({"logit_bias": {str(n): 1 for n in range(4097)}}, "logit_bias", "4096"),
        ({"modalities": ["text"] * 17}, "modalities", "16"),
    ],
)
def test_too_many_items_are_refused_with_their_limit(fields: dict[str, Any], param: str, limit: str) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.chat(**fields)
        assert answer.status == 400
        assert answer.json["error"]["param"] == param
        assert limit in answer.json["error"]["message"]

    served(body)
