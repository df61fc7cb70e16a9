"""Pacing: prompts reach their worker one after the other, never later than predicted, and none is held for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from msgspec.structs import replace
from tests.unit.engines.lab import make_request

from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.ids import InstanceId
from kvolt.core.request import Handoff, Request
from kvolt.router.choice import WorkerChoice
from kvolt.router.port import Decision
from kvolt.router.queue.prompt_pacing import PromptPacer, _Prompt, _RankPrompts
from kvolt.router.worker_rank import WorkerDpRank
from kvolt.testing import run_virtual

REQUEST = make_request(prompt=1000)
RECEIVED = replace(REQUEST, handoff=Handoff(ticket=b"", prefill_instance=InstanceId("p")))


class Scene:
    """Workers that compute a prompt of 1,000 tokens in a step of one second, of at most 2,048 tokens."""

    def __init__(self, is_enabled: bool = True) -> None:
        self.loop = asyncio.get_running_loop()
        self.pacer = PromptPacer(self.loop.time, is_enabled)
        self.num_decisions = 0
        self.sent: list[tuple[str, float]] = []

    def choice(
        self,
        queue_s: float,
        *,
        worker: str = "a",
        tokens: int = 1000,
        step_s: float = 0.01,
        request: Request = REQUEST,
    ) -> WorkerChoice:
        return WorkerChoice(
            WorkerDpRank(InstanceId(worker), 0),
            0,
            queue_s,
            tokens / 1000,
            False,
            request,
            tokens,
            0.0,
            step_s=step_s,
            max_step_tokens=2048,
        )

    def add(self, name: str, choice: WorkerChoice) -> Decision:
        self.num_decisions += 1
        instance = Instance(
            id=choice.worker_rank.instance_id, endpoint=EndpointAddress("n", "c", "e"), address="host:1"
        )
        decision = Decision(instance, reservation_id=self.num_decisions)
        self.pacer.add(decision, choice)

        async def send() -> None:
            await self.pacer.hold(decision)
            self.sent.append((name, self.loop.time()))

        self.task = self.loop.create_task(send())
        return decision


def scene(body: Callable[[Scene], Awaitable[None]], *, is_enabled: bool = True) -> None:
    async def scenario() -> None:
        here = Scene(is_enabled)
        await body(here)
        assert not here.pacer._prompts
        assert not here.pacer._ranks

    run_virtual(scenario)


def test_prompts_are_sent_in_the_last_step_of_those_before_them() -> None:
    async def body(here: Scene) -> None:
        decisions = [here.add(f"r{number}", here.choice(float(number))) for number in range(3)]
        await asyncio.sleep(10.0)
        assert here.sent == [("r0", 0.0), ("r1", pytest.approx(0.75)), ("r2", pytest.approx(1.75))]
        assert here.pacer.holds_s.num_observed == 2
        for decision in decisions:
            here.pacer.remove(decision)

    scene(body)


def test_only_the_last_step_of_a_long_prompt_counts() -> None:
    """5,000 tokens end with a step of 904, which takes a fifth of the time."""

    async def body(here: Scene) -> None:
        first = here.add("long", here.choice(0.0, tokens=5000))
        second = here.add("next", here.choice(5.0))
        await asyncio.sleep(10.0)
        assert here.sent == [("long", 0.0), ("next", pytest.approx(5.0 - 0.904 / 4))]
        here.pacer.remove(first)
        here.pacer.remove(second)

    scene(body)


def test_early_first_tokens_release_the_next_prompts_early() -> None:
    async def body(here: Scene) -> None:
        decisions = [here.add(f"r{number}", here.choice(float(number))) for number in range(3)]
        await asyncio.sleep(0.1)
        here.pacer.remove(decisions[0])
        await asyncio.sleep(5.0)
        assert here.sent == [("r0", 0.0), ("r1", pytest.approx(0.1)), ("r2", pytest.approx(0.85))]
        for decision in decisions[1:]:
            here.pacer.remove(decision)

    scene(body)


def test_a_late_first_token_holds_nothing_longer() -> None:
    async def body(here: Scene) -> None:
        decisions = [here.add(f"r{number}", here.choice(float(number))) for number in range(3)]
        await asyncio.sleep(1.5)
        here.pacer.remove(decisions[0])
        await asyncio.sleep(5.0)
        assert here.sent[-1] == ("r2", pytest.approx(1.75)), "as predicted, not a second after r1's start"
        for decision in decisions[1:]:
            here.pacer.remove(decision)

    scene(body)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"worker": "b"}, "another worker"),
        ({"step_s": 2.0}, "a step of its own costs more"),
        ({"request": RECEIVED}, "its KV is computed elsewhere"),
        ({"queue_s": 0.0}, "the worker is late: no prediction says for how long"),
        ({"queue_s": 0.2}, "the last step is half done"),
    ],
)
def test_sent_at_once(second: dict[str, object], why: str) -> None:
    async def body(here: Scene) -> None:
        choice = here.choice(**{"queue_s": 1.0, **second})  # type: ignore[arg-type]
        decisions = [here.add("first", here.choice(0.0))]
        assert here.pacer.can_send(choice), why
        decisions.append(here.add("second", choice))
        await asyncio.sleep(0.0)
        assert here.sent == [("first", 0.0), ("second", 0.0)], why
        for decision in decisions:
            here.pacer.remove(decision)

    scene(body)


def test_a_higher_priority_does_not_wait_for_lower_ones() -> None:
    """The worker computes it next; held behind the others, it would be the last."""

    async def body(here: Scene) -> None:
        urgent = replace(REQUEST, routing=replace(REQUEST.routing, priority=1))
        decisions = [here.add(f"r{number}", here.choice(float(number))) for number in range(3)]
        assert here.pacer.can_send(here.choice(3.0, request=urgent))
        decisions.append(here.add("urgent", here.choice(3.0, request=urgent)))
        await asyncio.sleep(0.0)
        assert here.sent == [("r0", 0.0), ("urgent", 0.0)]
        for decision in decisions:
            here.pacer.remove(decision)
        await asyncio.sleep(0.0)

    scene(body)


def test_equal_priorities_are_paced() -> None:
    async def body(here: Scene) -> None:
        urgent = replace(REQUEST, routing=replace(REQUEST.routing, priority=1))
        first = here.add("first", here.choice(0.0, request=urgent))
        assert not here.pacer.can_send(here.choice(1.0, request=urgent))
        assert not here.pacer.can_send(here.choice(1.0))
        here.pacer.remove(first)

    scene(body)


def test_a_prompt_that_would_fill_a_step_by_itself_is_not_delayed_for_nothing() -> None:
    """Nothing of the second prompt fits beside the 2,048 tokens of the first: it cannot delay them."""

    async def body(here: Scene) -> None:
        first = here.add("first", here.choice(0.0, tokens=2048))
        assert here.pacer.can_send(here.choice(2.0))
        here.pacer.remove(first)

    scene(body)


def test_disabled() -> None:
    async def body(here: Scene) -> None:
        here.add("first", here.choice(0.0))
        here.add("second", here.choice(1.0))
        await asyncio.sleep(0.0)
        assert [name for name, _ in here.sent] == ["first", "second"]

    scene(body, is_enabled=False)


def test_a_cancelled_prompt_does_not_hold_the_next_one() -> None:
    async def body(here: Scene) -> None:
        first = here.add("first", here.choice(0.0))
        second = here.add("second", here.choice(1.0))
        task = here.task
        third = here.add("third", here.choice(2.0))
        await asyncio.sleep(0.1)
        task.cancel()
        here.pacer.remove(second)
        await asyncio.sleep(5.0)
        assert here.sent == [("first", 0.0), ("third", pytest.approx(0.85))]
        here.pacer.remove(first)
        here.pacer.remove(third)

    scene(body)


def test_a_lost_worker_holds_nothing() -> None:
    async def body(here: Scene) -> None:
        decisions = [here.add(f"r{number}", here.choice(float(number))) for number in range(3)]
        await asyncio.sleep(0.1)
        for decision in decisions:
            here.pacer.remove(decision)
            await asyncio.sleep(0.0)
            await asyncio.sleep(0.0)
        assert [at for _, at in here.sent] == [0.0, pytest.approx(0.1), pytest.approx(0.1)]

    scene(body)


def test_a_prompt_that_is_removed_while_it_is_held_waits_no_longer() -> None:
    async def body(here: Scene) -> None:
        first = here.add("first", here.choice(0.0))
        second = here.add("second", here.choice(1.0))
        await asyncio.sleep(0.1)
        here.pacer.remove(second)
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert here.sent[1:] == [("second", pytest.approx(0.1))]
        here.pacer.remove(first)

    scene(body)


def test_held_prompts_of_a_worker_share_a_timer() -> None:
    """A timer for each one was renewed with every first token: a millisecond per token behind 256 prompts."""

    async def body(here: Scene) -> None:
        timers: list[asyncio.TimerHandle] = []
        call_at = here.loop.call_at

        def counted(*args: object, **options: object) -> asyncio.TimerHandle:
            timers.append(call_at(*args, **options))  # type: ignore[arg-type]
            return timers[-1]

        here.loop.call_at = counted  # type: ignore[assignment]
        decisions = [here.add(f"r{number}", here.choice(float(number))) for number in range(50)]
        await asyncio.sleep(0.1)
        del timers[:]
        here.pacer.remove(decisions[0])
        assert len(timers) == 1
        for decision in decisions[1:]:
            here.pacer.remove(decision)
        await asyncio.sleep(0.0)

    scene(body)


def test_a_timer_of_uvloop_that_is_almost_due_can_be_replaced() -> None:
    """uvloop calls at once what is due within half a millisecond, with a handle that has no time."""

    async def scenario() -> None:
        prompts = _RankPrompts(asyncio.get_running_loop())
        here = Scene()
        for number, hold_s in enumerate((1e-4, 1e-5, 1e-6)):
            prompts.by_reservation[number] = prompt = _Prompt(here.choice(0.0))
            prompts.hold(prompt, hold_s)
        async with asyncio.timeout(10):
            await asyncio.gather(*(prompt.sending for prompt in prompts if prompt.sending is not None))

    uvloop.run(scenario())


def test_only_the_prompts_of_reachable_workers_stay_held() -> None:
    async def body(here: Scene) -> None:
        names = ("a", "a", "b", "b")
        decisions = [
            here.add(name, here.choice(number % 2, worker=name)) for number, name in enumerate(names)
        ]
        here.pacer.end_holds(frozenset({InstanceId("a")}))
        assert [here.pacer.is_held(each) for each in decisions] == [False, True, False, True]
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert sorted(name for name, _ in here.sent) == ["a", "b", "b"]
        for decision in decisions:
            here.pacer.remove(decision)

    scene(body)


def test_the_end_of_the_router_sends_all() -> None:
    async def body(here: Scene) -> None:
        decisions = [here.add(f"r{number}", here.choice(float(number))) for number in range(5)]
        here.pacer.end_holds()
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert len(here.sent) == 5
        for decision in decisions:
            here.pacer.remove(decision)

    scene(body)
