"""The shell around an engine of others: its life, and that nothing of a request stays where it must not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.remote.lab import greedy

from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.delta import FinishReason, StepOutput
from kvolt.core.errors import (
    ConfigError,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    Unsupported,
)
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Role, Sampling
from kvolt.engines.external.answers import Choice, ChoiceOutput
from kvolt.engines.external.base import ExternalEngine
from kvolt.engines.external.description import limits_of
from kvolt.scheduler.step_plan import Limits

CARD = ModelCard(
    name="m", tokenizer_json=b"", context_length=256, block_size=16, eos_token_ids=(2,), chat_template=None
)
INFO = EngineInfo(
    engine="toy",
    role=Role.AGGREGATED,
    model="m",
    card=card_hash(CARD),
    block_size=16,
    capacity=Capacity(max_num_seqs=2, max_batch_tokens=64, kv_total_blocks=0),
    dp_ranks=(0,),
)


@dataclass
class Running:
    card: ModelCard = CARD
    info: EngineInfo = INFO
    limits: Limits = field(default_factory=lambda: limits_of(INFO, CARD, 3))
    vocab_size: int | None = None
    is_released: bool = False


class Toy(ExternalEngine[Running]):
    name, title = "toy", "Toy"
    sampling_fields = frozenset[str]()
    sampling_fields = frozenset(Sampling.__struct_fields__)

    def __init__(
        self,
        load: Callable[[], Running] = Running,
        release: Callable[[Running], object] = lambda running: setattr(running, "is_released", True),
    ) -> None:
        super().__init__()
        self._make = load
        self._unmake = release
        self.has: dict[str, Choice] = {}
        self.ends = 0
        self.shut_downs = 0
        self.begin_error: Exception | None = None
        self.begins: asyncio.Event | None = None
        self.shut_down_error: Exception | None = None
        self.refuses: Exception | None = None

    async def _launch(self) -> Running:
        return await self._load(self._make, self._unmake)

    async def _start_tasks(self, running: Running) -> None:
        if self.begins is not None:
            await self.begins.wait()
        if self.begin_error is not None:
            raise self.begin_error

    async def _shut_down(self) -> None:
        self.shut_downs += 1
        if self.shut_down_error is not None:
            raise self.shut_down_error

    def _on_end(self) -> None:
        self.ends += 1

    def _submit_choices(self, request: Request, choices: list[Choice]) -> None:
        for choice in choices:
            if self.refuses is not None and choice is choices[-1]:
                raise self.refuses
            self.has[choice.engine_id] = choice

    def _abort_choices(self, engine_ids: list[str]) -> None:
        for each in engine_ids:
            self.has.pop(each, None)

    def fail(self, error: Exception) -> None:
        async def failing() -> None:
            raise error

        self._task_group.start(failing(), "failing")

    def go_on(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._start_task(work, "test")

    async def call(self, call: Callable[[], None]) -> None:
        await self._run_blocking(call)

    def say(self, token: int, finish: FinishReason | None = None) -> None:
        for choice in self.has.values():
            self._answers.add_output(choice, ChoiceOutput((token,), finish))
        self._step_queue.put(self._answers.take_step())

    def give_up(self, name: str) -> None:
        self._fail_request(RequestId(name), Unsupported("no", feature="x"))
        self._step_queue.put(self._answers.take_step())

    @property
    def running(self) -> Running | None:
        return self._running


def several(name: str, count: int) -> Request:
    request = greedy(name)
    return replace(request, sampling=replace(request.sampling, num_choices=count, temperature=1.0))


async def rest_of(toy: Toy) -> list[StepOutput]:
    return [step async for step in toy.steps()]


async def test_a_life() -> None:
    toy = Toy()
    with pytest.raises(EngineFailed, match="is not started"):
        _ = toy.card
    assert await toy.start() is INFO
    assert toy.card is CARD
    with pytest.raises(EngineFailed, match="started only once"):
        await toy.start()
    await asyncio.gather(toy.close(), toy.close())
    await toy.close()
    assert (toy.ends, toy.shut_downs) == (1, 1)
    assert await rest_of(toy) == []
    with pytest.raises(EngineDied, match="has ended"):
        toy.submit(greedy())
    with pytest.raises(EngineFailed, match="started only once"):
        await toy.start()


async def test_one_that_was_never_started_is_closed() -> None:
    toy = Toy()
    await toy.close()
    assert (toy.ends, toy.shut_downs) == (1, 1)


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (ConfigError("no such model", key="model"), ConfigError, "no such model"),
        (OSError("no space"), EngineFailed, "Toy did not start: no space"),
    ],
)
async def test_why_it_did_not_start(raised: Exception, kind: type[Exception], words: str) -> None:
    def load() -> Running:
        raise raised

    toy = Toy(load)
    with pytest.raises(kind, match=words):
        await toy.start()
    assert toy.ends == 1, "nothing goes on"
    await toy.close()
    assert toy.shut_downs == 1


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(ConfigError("a bad adapter", key="args.loras"), ConfigError), (OSError("x"), EngineFailed)],
)
async def test_what_begins_badly_is_shut_down(raised: Exception, kind: type[Exception]) -> None:
    toy = Toy()
    toy.begin_error = raised
    with pytest.raises(kind):
        await toy.start()
    assert toy.running is not None
    assert toy.running.is_released, "though nobody has closed it"
    assert toy.shut_downs == 1
    await toy.close()
    assert toy.shut_downs == 1


async def test_what_died_while_it_began_says_why() -> None:
    toy = Toy()
    toy.begins = asyncio.Event()
    starting = asyncio.ensure_future(toy.start())
    await asyncio.sleep(0.01)
    toy.fail(RuntimeError("a wheel came off\nit wrote last: clank"))
    await asyncio.sleep(0.01)
    toy.begins.set()
    with pytest.raises(EngineFailed, match=r"Toy failed: a wheel came off\nit wrote last"):
        await starting


class Slow:
    """Loads in a thread until it may end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.made = Running()

    def __call__(self) -> Running:
        self.begun.set()
        assert self.may_end.wait(10)
        return self.made


async def test_engine_loaded_after_a_cancelled_start_is_released() -> None:
    slow = Slow()
    toy = Toy(slow)
    starting = asyncio.ensure_future(toy.start())
    await asyncio.to_thread(slow.begun.wait, 10)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    closing = asyncio.ensure_future(toy.close())
    await asyncio.sleep(0.02)
    assert not closing.done(), "a thread cannot be stopped"
    slow.may_end.set()
    await closing
    assert slow.made.is_released
    assert toy.running is None


async def test_closed_while_it_loads() -> None:
    slow = Slow()
    toy = Toy(slow)
    starting = asyncio.ensure_future(toy.start())
    await asyncio.to_thread(slow.begun.wait, 10)
    closing = asyncio.ensure_future(toy.close())
    await asyncio.sleep(0)
    slow.may_end.set()
    with pytest.raises(EngineDied):
        await starting
    await closing
    assert slow.made.is_released
    assert toy.shut_downs == 1


async def test_who_waits_for_the_end_may_go() -> None:
    slow = Slow()
    toy = Toy(slow)
    starting = asyncio.ensure_future(toy.start())
    await asyncio.to_thread(slow.begun.wait, 10)
    impatient = asyncio.ensure_future(toy.close())
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    slow.may_end.set()
    await toy.close()
    assert toy.shut_downs == 1
    with pytest.raises(EngineDied):
        await starting


async def test_loaded_while_the_loop_was_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has ended, nobody has heard of it yet, and the engine is closed."""
    slow = Slow()
    toy = Toy(slow)
    starting = asyncio.ensure_future(toy.start())
    await asyncio.to_thread(slow.begun.wait, 10)
    slow.may_end.set()
    time.sleep(0.1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await toy.close()
    assert slow.made.is_released


async def test_closed_while_it_begins() -> None:
    toy = Toy()
    toy.begins = asyncio.Event()
    starting = asyncio.ensure_future(toy.start())
    await asyncio.sleep(0.01)
    await toy.close()
    with pytest.raises(EngineDied):
        await starting
    assert toy.running is not None
    assert toy.running.is_released


async def test_failed_release_still_closes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stuck(running: Running) -> None:
        if running.is_released:
            raise OSError("it is gone already")
        time.sleep(0.3)

    monkeypatch.setattr("kvolt.engines.external.base._STOP_S", 0.05)
    for is_gone, words in ((True, "gone already"), (False, "Timeout")):
        toy = Toy(lambda is_gone=is_gone: Running(is_released=is_gone), stuck)
        await toy.start()
        await toy.close()
        assert toy.shut_downs == 1
        assert words in caplog.text


async def test_calls_in_threads_end_before_the_release() -> None:
    order: list[str] = []
    toy = Toy(Running, lambda running: order.append("let go"))
    await toy.start()
    begun = threading.Event()

    def call() -> None:
        begun.set()
        time.sleep(0.1)
        order.append("call")

    toy.go_on(lambda: toy.call(call))
    await asyncio.to_thread(begun.wait, 10)
    await toy.close()
    assert order == ["call", "let go"]


async def test_ended_task_ends_the_engine() -> None:
    toy = Toy()
    await toy.start()
    toy.go_on(lambda: asyncio.sleep(0))
    with pytest.raises(EngineFailed, match="Toy failed: the task 'test' ended"):
        await rest_of(toy)
    await toy.close()


async def test_of_several_choices_none_stays_after_an_error() -> None:
    toy = Toy()
    await toy.start()
    toy.refuses = RuntimeError("a bug")
    with pytest.raises(RuntimeError):
        toy.submit(several("r", 2))
    assert not toy.has
    await toy.close()


async def test_choices_count_in_the_queue() -> None:
    toy = Toy()
    await toy.start()
    toy.submit(several("r", 5))
    with pytest.raises(Overloaded):
        toy.submit(greedy("more"))
    await toy.close()


async def test_one_that_dies_while_it_begins_is_not_waited_for() -> None:
    toy = Toy()
    toy.begins = asyncio.Event()  # an answer that never comes
    starting = asyncio.ensure_future(toy.start())
    await asyncio.sleep(0.01)
    toy.fail(RuntimeError("a wheel came off"))
    async with asyncio.timeout(5):
        with pytest.raises(EngineFailed, match="Toy failed: a wheel came off"):
            await starting
    assert toy.shut_downs == 1


async def test_a_call_that_ends_only_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.engines.external.base._STOP_S", 0.05)
    is_released, begun = threading.Event(), threading.Event()
    toy = Toy(Running, lambda running: is_released.set())
    await toy.start()

    def call() -> None:
        begun.set()
        assert is_released.wait(10)

    toy.go_on(lambda: toy.call(call))
    await asyncio.to_thread(begun.wait, 10)
    async with asyncio.timeout(5):
        await toy.close()
    assert is_released.is_set()
    with pytest.raises(EngineDied):
        await toy.call(call)


async def test_start_error_is_reported_despite_a_failed_shutdown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    toy = Toy()
    toy.begin_error = ConfigError("a bad adapter", key="args.loras")
    toy.shut_down_error = OSError("a file is left")
    with pytest.raises(ConfigError, match="a bad adapter"):
        await toy.start()
    assert "a file is left" in caplog.text


async def test_a_task_s_error_is_its_death() -> None:
    toy = Toy()
    await toy.start()
    toy.submit(greedy("one"))
    toy.say(5)
    toy.fail(RuntimeError("a wheel\ncame off"))
    steps = toy.steps()
    assert (await anext(steps)).deltas[0][0] == "one", "what was said before is told"
    with pytest.raises(EngineFailed, match="Toy failed: a wheel"):
        await anext(steps)
    with pytest.raises(EngineDied, match=r"^Toy failed: a wheel$") as caught:
        toy.submit(greedy("two"))
    with pytest.raises(EngineDied) as again:
        toy.submit(greedy("two"))
    assert caught.value is not again.value
    toy.abort(RequestId("one"))
    assert not await toy.withdraw(RequestId("one"))
    await toy.close()


async def test_what_it_refuses_late_leaves_nothing() -> None:
    toy = Toy()
    await toy.start()
    toy.refuses = InvalidRequest("it says no", param="request")
    for _ in range(2):  # the id is not taken by the one before
        with pytest.raises(InvalidRequest, match="it says no"):
            toy.submit(greedy())
    toy.refuses = None
    toy.submit(greedy())
    assert len(toy.has) == 1
    await toy.close()


async def test_a_full_queue() -> None:
    """Two run and three wait."""
    toy = Toy()
    await toy.start()
    for number in range(5):
        toy.submit(greedy(str(number)))
    with pytest.raises(Overloaded) as caught:
        toy.submit(greedy("more"))
    assert caught.value.fields["limit"] == 3
    toy.abort(RequestId("0"))
    toy.submit(greedy("more"))
    await toy.close()


async def test_no_output_after_an_abort() -> None:
    toy = Toy()
    await toy.start()
    toy.submit(greedy("one"))
    toy.submit(greedy("two"))
    toy.say(5)
    toy.abort(RequestId("one"))
    assert len(toy.has) == 1
    step = await anext(toy.steps())
    assert [name for name, _ in step.deltas] == ["two"]
    await toy.close()


async def test_one_that_has_said_something_is_not_given_back() -> None:
    toy = Toy()
    await toy.start()
    toy.submit(greedy("one"))
    toy.say(5)
    toy.submit(greedy("two"))
    assert not await toy.withdraw(RequestId("one"))
    assert await toy.withdraw(RequestId("two"))
    assert not await toy.withdraw(RequestId("two"))
    assert [choice.request.request_id for choice in toy.has.values()] == ["one"]
    await toy.close()


async def test_unanswerable_request_is_dropped_and_failed() -> None:
    toy = Toy()
    await toy.start()
    toy.submit(greedy("one"))
    toy.give_up("one")
    assert not toy.has
    step = await anext(toy.steps())
    assert [name for name, _ in step.failed] == ["one"]
    await toy.close()
