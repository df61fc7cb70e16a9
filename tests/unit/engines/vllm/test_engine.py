"""VllmEngine's life and its requests over the stand-in: starts that fail, cores that die, readers that do not read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.external.publisher import AllBlocksCleared, Publisher, payload_of
from tests.unit.engines.vllm.fake_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    SchedulerStats,
)
from tests.unit.engines.vllm.lab import ARGUMENTS, Harness, core_of, only_llm, running, with_args
from tests.unit.engines.vllm.stand_in import AsyncLLM

from kvolt.core.delta import StepOutput
from kvolt.core.errors import (
    ConfigError,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    Overloaded,
    Unavailable,
    Unsupported,
)
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Cleared
from kvolt.core.request import Request, RoutingHints, Sampling, StopConditions
from kvolt.engines.step_queue import StepQueue
from kvolt.engines.vllm.engine import VllmEngine
from kvolt.engines.vllm.launch import Launched, launch
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.engines.harness import engine_run

QUIET = replace(ARGUMENTS, kv_events=False)


def asked(name: str = "r", *, prompt: int = 20, tokens: int = 8, choices: int = 1, **more: Any) -> Request:
    return Request(
        request_id=RequestId(name),
        model="tiny",
        token_ids=tuple(range(100, 100 + prompt)),
        stop=StopConditions(max_tokens=tokens, ignore_eos=True),
        sampling=Sampling(seed=1, num_choices=choices),
        **more,
    )


async def soon(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def all_steps(engine: VllmEngine) -> list[StepOutput]:
    return [step async for step in engine.steps()]


# --- start


async def test_it_knows_its_model_once_it_is_started(model: str) -> None:
    engine = Harness(model).engine()
    with pytest.raises(EngineFailed, match="is not started"):
        _ = engine.card
    with pytest.raises(EngineFailed, match="is not started"):
        engine.submit(asked())
    engine.abort(RequestId("nobody"))
    info = await engine.start()
    assert (info.engine, info.model, info.block_size, info.features) == ("vllm", "tiny", 16, ("KvEvents",))
    assert (info.capacity.kv_total_blocks, info.capacity.max_num_seqs) == (200, 48)
    assert (engine.card.eos_token_ids, engine.card.bos_token_id) == ((2, 5), None)
    with pytest.raises(EngineFailed, match="started only once"):
        await engine.start()
    await engine.close()
    with pytest.raises(EngineFailed, match="started only once"):
        await engine.start()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConfigError("no such model", key="model"), ConfigError, "no such model"),
        (RuntimeError("no device"), EngineFailed, "vLLM did not start: no device"),
    ],
)
async def test_a_start_that_fails(model: str, error: Exception, kind: type[KvoltError], message: str) -> None:
    def launcher(*_: object) -> Launched:
        raise error

    engine = Harness(model, launcher=launcher).engine()
    with pytest.raises(kind, match=message):
        await engine.start()
    with pytest.raises(EngineDied):
        engine.submit(asked())
    await engine.close()
    await engine.close()


class Slow:
    """A launch that takes as long as a test wants."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, *given: Any) -> Launched:
        self.begun.set()
        assert self.may_end.wait(10)
        return launch(*given)


async def cancelled_start(engine: VllmEngine, slow: Slow) -> None:
    task_group = TaskGroup("start")
    task_group.start(engine.start(), "start")
    assert await asyncio.to_thread(slow.begun.wait, 10)
    await task_group.close()


async def test_cancelled_start_releases_the_loaded_engine(model: str) -> None:
    slow = Slow()
    engine = Harness(model, QUIET, launcher=slow).engine()
    await cancelled_start(engine, slow)
    with pytest.raises(EngineDied):
        engine.submit(asked())
    slow.may_end.set()
    await soon(lambda: AsyncLLM.made and only_llm().num_shutdowns)
    await engine.close()
    assert only_llm().num_shutdowns == 1
    assert await all_steps(engine) == []


async def test_engine_loaded_during_close_is_released(model: str) -> None:
    slow = Slow()
    engine = Harness(model, QUIET, launcher=slow).engine()
    await cancelled_start(engine, slow)
    task_group = TaskGroup("close")
    closing = task_group.start(engine.close(), "close")
    await asyncio.sleep(0)
    slow.may_end.set()
    await closing
    await asyncio.get_running_loop().shutdown_default_executor()
    assert only_llm().num_shutdowns == 1


# --- the end


async def test_close_twice_and_at_once(model: str) -> None:
    engine = Harness(model).engine()
    await engine.start()
    sockets = Path(engine._sockets.name)  # type: ignore[union-attr]
    assert sockets.is_dir()
    async with asyncio.timeout(10):
        await asyncio.gather(engine.close(), engine.close())
        await engine.close()
    assert only_llm().num_shutdowns == 1
    assert not sockets.exists()
    assert await all_steps(engine) == []
    with pytest.raises(EngineDied):
        engine.submit(asked())
    engine.abort(RequestId("r"))
    assert not await engine.withdraw(RequestId("r"))


async def test_close_before_start(model: str) -> None:
    engine = Harness(model).engine()
    await engine.close()
    assert await all_steps(engine) == []
    assert AsyncLLM.made == []


async def test_a_close_that_is_cancelled_is_done_by_the_next(model: str) -> None:
    engine = Harness(model, QUIET).engine()
    await engine.start()
    task_group = TaskGroup("close")
    task_group.start(engine.close(), "close")
    await asyncio.sleep(0)
    await task_group.close()
    await engine.close()
    assert only_llm().num_shutdowns == 1


async def test_when_the_core_dies_so_does_the_engine(model: str) -> None:
    engine = Harness(model, QUIET).engine()
    await engine.start()
    core = core_of(engine)
    core.pause()
    engine.submit(asked("open"))
    core.put(EngineCoreOutputs(scheduler_stats=SchedulerStats(1)))
    core.die(RuntimeError("EngineCore encountered an issue"))
    heard: list[StepOutput] = []
    with pytest.raises(EngineFailed, match="vLLM failed: EngineCore encountered an issue"):
        async for step in engine.steps():
            heard.append(step)
    assert [step.load.running for step in heard if step.load] == [1], "what it had said before is told"
    with pytest.raises(EngineDied) as caught:
        engine.submit(asked("late"))
    assert caught.value.retryable
    engine.abort(RequestId("open"))
    await engine.close()
    assert only_llm().num_shutdowns == 1


async def test_an_error_without_words_has_a_name(model: str) -> None:
    engine = Harness(model, QUIET).engine()
    await engine.start()
    core_of(engine).die(KeyError())
    with pytest.raises(EngineFailed, match="vLLM failed: KeyError"):
        await all_steps(engine)
    await engine.close()


async def test_a_core_that_takes_nothing_any_more_is_dead(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(request: object) -> None:
        raise RuntimeError("EngineCore is gone")

    engine = Harness(model, QUIET).engine()
    await engine.start()
    monkeypatch.setattr(core_of(engine), "add_request_async", refuse)
    engine.submit(asked())
    with pytest.raises(EngineFailed, match="EngineCore is gone"):
        await all_steps(engine)
    await engine.close()


@pytest.mark.parametrize("call", ["prefill", "clear_kv", "sleep", "load_lora"])
async def test_what_is_asked_of_a_closed_engine_is_a_known_error(model: str, call: str) -> None:
    engine = Harness(model, with_args(QUIET, enable_lora=True)).engine()
    await engine.start()
    await engine.close()
    given: dict[str, tuple[Any, ...]] = {"load_lora": ("a", "/a"), "sleep": (1,), "prefill": (asked(),)}
    with pytest.raises(EngineDied):
        await getattr(engine, call)(*given.get(call, ()))


# --- requests on their way


async def test_a_request_as_the_core_gets_it(model: str) -> None:
    async with running(Harness(model, with_args(QUIET, data_parallel_size=2))) as (run, core):
        request = asked(choices=2, salt="tenant", routing=RoutingHints(priority=3, pinned_dp_rank=1))
        await run.answer(request)
        one, other = core.received
        assert (one.priority, one.data_parallel_rank, one.external_req_id) == (-3, 1, "r")
        assert one.cache_salt == "kvolt-salt:tenant"
        assert one.prompt_token_ids == list(request.token_ids)
        assert one.request_id != other.request_id
        assert (one.sampling_params.seed, other.sampling_params.seed) == (1, 2)


async def test_what_vllm_refuses_leaves_nothing(model: str) -> None:
    async with running(Harness(model, QUIET)) as (run, core):
        bad = [
            asked(routing=RoutingHints(pinned_dp_rank=4)),
            replace(asked(), sampling=Sampling(temperature=9.0)),
            replace(asked(choices=2), sampling=Sampling(num_choices=2, prompt_logprobs=21)),
        ]
        for request in bad:
            with pytest.raises(InvalidRequest, match="vLLM refuses the request"):
                run.engine.submit(request)
        await run.answer(asked())
        assert len(core.received) == 1


async def test_tokens_that_the_model_does_not_have(model: str) -> None:
    async with running(Harness(model, QUIET)) as (run, core):
        with pytest.raises(InvalidRequest, match="token 5000 is outside"):
            run.engine.submit(replace(asked(), token_ids=(1, 5000)))
        assert core.received == []


async def test_too_many_wait(model: str) -> None:
    """Those that run do not count; one that goes makes room."""
    arguments = replace(with_args(QUIET, max_num_seqs=3), max_waiting=2)
    async with running(Harness(model, arguments)) as (run, core):
        core.pause()
        answers = [run.submit(asked(f"r{number}", choices=1 + number)) for number in range(2)]
        answers += [run.submit(asked(f"s{number}")) for number in range(2)]
        with pytest.raises(Overloaded) as caught:
            run.engine.submit(asked("late"))
        assert caught.value.fields == {"queue": "engine", "limit": 2}
        run.abort(answers.pop())
        answers.append(run.submit(asked("late")))
        core.go_on()
        await run.finish(*answers)


async def test_what_vllm_gives_up_on_fails_alone(model: str) -> None:
    async with running(Harness(model, QUIET)) as (run, core):
        core.pause()
        lost = run.submit(asked("lost", choices=2), may_fail=True)
        other = run.submit(asked("other"))
        core.gives_up = FinishReason.ERROR
        core.go_on()
        await run.finish(lost, other)
        assert lost.error is not None
        assert (lost.error.code, lost.error.fields["reason"]) == ("engine_died", "error")
        assert len(other.tokens[0]) == 8
        await run.assert_empty()
        ids = [request.request_id for request in core.received if request.external_req_id == "lost"]
        assert ids[1] in core.aborted, "its other choice is stopped"
        assert set(core.aborted) <= set(ids)


async def test_output_of_unknown_requests_is_ignored(model: str) -> None:
    async with running(Harness(model, QUIET)) as (run, core):
        core.put(EngineCoreOutputs(outputs=[EngineCoreOutput("nobody", [1])]))
        assert len((await run.answer(asked())).tokens[0]) == 8


async def test_abort_drops_unread_output(model: str) -> None:
    engine = Harness(model, QUIET).engine()
    await engine.start()
    core = core_of(engine)
    for name in ("goes", "stays"):
        engine.submit(asked(name))
    await soon(lambda: core.received and not core.running and not core.num_unread)
    engine.abort(RequestId("goes"))
    task_group = TaskGroup("read")
    heard: list[StepOutput] = []

    async def read() -> None:
        async for step in engine.steps():
            heard.append(step)

    task_group.start(read(), "read")
    await soon(lambda: any(delta.finish for step in heard for _, delta in step.deltas))
    told = {name for step in heard for name in (*step.plain_ids, *(each for each, _ in step.deltas))}
    assert told == {"stays"}
    await task_group.close()
    await engine.close()


async def test_nothing_is_lost_without_a_reader(model: str) -> None:
    """It takes no more from vLLM than it has room for, and goes on when there is some."""
    engine = Harness(model, QUIET).engine()
    engine._step_queue = StepQueue(max_steps=4)
    await engine.start()
    core = core_of(engine)
    engine.submit(asked(tokens=50))
    await soon(lambda: core.received and not core.running)
    assert len(engine._step_queue._steps) == 4
    assert core.num_unread == 50 - 4
    tokens: list[int] = []
    async for step in engine.steps():
        tokens += [token for _, delta in step.deltas for token in delta.token_ids]
        tokens += step.plain_tokens
        if len(tokens) == 50:
            break
    await engine.close()
    async with engine_run(Harness(model, QUIET)) as run:
        assert (await run.answer(asked(tokens=50))).tokens[0] == tokens


async def test_load_is_reported_when_it_changes(model: str) -> None:
    """While others fetch from it vLLM makes steps in which nothing happens."""
    async with running(Harness(model, QUIET)) as (run, core):
        idle, busy = SchedulerStats(0), SchedulerStats(1, kv_cache_usage=0.5)
        for stats in (busy, busy, busy, idle, None, busy):
            core.put(EngineCoreOutputs(scheduler_stats=stats))
        await soon(lambda: not core.num_unread)
        await soon(lambda: run.num_steps >= 3)
        assert run.num_steps == 3
        assert (run.load.running, run.load.kv_used_blocks) == (1, 100)


async def test_vllm_counts_what_it_says(model: str) -> None:
    async with running(Harness(model, QUIET)) as (run, _):
        answer = run.submit(asked("stopped", tokens=50))
        await run.until(lambda: bool(answer.tokens))
        run.abort(answer)
        await run.answer(asked(choices=2))
        logger = only_llm().logger_manager
        assert logger is not None
        ended = [told for _, each, _ in logger.records if each is not None for told in each.finished_requests]
        assert [told["num_prompt_tokens"] for told in ended] == [20, 20]
        assert run.engine._request_stats._requests == {}  # type: ignore[attr-defined]


async def test_it_need_not_count(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def launcher(*given: Any) -> Launched:
        launched = launch(*given)
        launched.llm.logger_manager = None
        return launched

    async with engine_run(Harness(model, QUIET, launcher=launcher)) as run:
        await run.answer(asked())


# --- KV


async def test_clear_counts_published_blocks(model: str) -> None:
    async with running(Harness(model)) as (run, _):
        await run.answer(asked(prompt=65, tokens=2))
        engine: Any = run.engine
        assert await engine.clear_kv() == 4
        await run.until(lambda: run.replica.num_cleared == 1)
        assert await engine.clear_kv() == 0


async def test_a_clear_that_vllm_refuses(model: str) -> None:
    async with running(Harness(model)) as (run, core):
        await run.answer(asked(prompt=65, tokens=2))
        core.refuses_reset = True
        engine: Any = run.engine
        with pytest.raises(Unavailable):
            await engine.clear_kv()
        core.refuses_reset = False
        assert await engine.clear_kv() == 4, "nothing was forgotten before"


async def test_events_are_those_of_their_rank(model: str, tmp_path: Path) -> None:
    """vLLM names its sources in the order in which its ranks were ready."""
    folders = {rank: tmp_path / f"rank{rank}" for rank in (1, 0)}
    for each in folders.values():
        each.mkdir()
    publishers = {rank: Publisher.within(each) for rank, each in folders.items()}

    def launcher(*given: Any) -> Launched:
        launched = launch(*given)
        launched.events = {rank: (each.endpoint, each.replay_endpoint) for rank, each in publishers.items()}
        return launched

    engine = Harness(model, QUIET, launcher=launcher).engine()
    try:
        await engine.start()
        for each in publishers.values():
            each.wait_for_reader()
        publishers[1].publish(payload_of(AllBlocksCleared(), rank=1))
        async with asyncio.timeout(10):
            async for step in engine.steps():
                assert step.kv_changes == (Cleared(),)
                assert step.load is not None
                assert step.load.dp_rank == 1
                break
    finally:
        await engine.close()
        for each in publishers.values():
            each.close()


# --- sleep


async def test_sleep_and_wake_are_vllms(model: str) -> None:
    """Weights that were dropped are read again before anything is computed."""
    async with running(Harness(model, with_args(enable_sleep_mode=True))) as (run, core):
        assert "Sleep" in run.info.features
        engine: Any = run.engine
        await run.answer(asked(prompt=65, tokens=2))
        await engine.sleep(1)
        await run.until(lambda: run.replica.num_cleared == 1)
        with pytest.raises(Unavailable, match="asleep"):
            engine.submit(asked())
        await engine.wake()
        assert core.slept == [1, None]
        await engine.sleep(2)
        await engine.wake()
        assert core.slept[2:] == [2, ["weights"], "reload_weights", None]
        await run.answer(asked(prompt=65, tokens=2))


async def test_it_does_not_sleep_while_requests_run(model: str) -> None:
    async with running(Harness(model, with_args(QUIET, enable_sleep_mode=True))) as (run, core):
        engine: Any = run.engine
        core.pause()
        answer = run.submit(asked())
        with pytest.raises(Unavailable, match="while requests run"):
            await engine.sleep(1)
        with pytest.raises(InvalidRequest, match="level"):
            await engine.sleep(3)
        core.go_on()
        await run.finish(answer)
        assert core.slept == []


async def test_a_sleep_that_fails_is_none(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(Harness(model, with_args(QUIET, enable_sleep_mode=True))) as (run, core):
        engine: Any = run.engine

        async def fails(level: int) -> None:
            raise RuntimeError("no room")

        monkeypatch.setattr(core, "sleep_async", fails)
        with pytest.raises(RuntimeError):
            await engine.sleep(1)
        await run.answer(asked())


async def test_without_sleep_mode_it_is_refused(model: str) -> None:
    """A CPU's worker would pass it over with a warning."""
    async with running(Harness(model, QUIET)) as (run, core):
        engine: Any = run.engine
        for call in (engine.sleep(1), engine.wake()):
            with pytest.raises(Unsupported, match="enable_sleep_mode"):
                await call
        assert core.slept == []


# --- ranks


async def test_a_rank_has_its_own_blocks_and_all_are_cleared(model: str) -> None:
    async with running(Harness(model, with_args(QUIET, data_parallel_size=2))) as (run, _):
        assert run.info.dp_ranks == (0, 1)
        assert run.info.capacity.kv_total_blocks == 200, "vLLM adds them up"
        engine: Any = run.engine
        await engine.clear_kv()
        await run.until(lambda: run.replica.num_cleared == 2)
        assert (run.load.dp_rank, run.load.kv_total_blocks) == (1, 200)


async def test_every_rank_has_room_for_requests(model: str) -> None:
    arguments = replace(with_args(QUIET, data_parallel_size=2, max_num_seqs=3), max_waiting=1)
    async with running(Harness(model, arguments)) as (run, core):
        core.pause()
        answers = [run.submit(asked(f"r{number}")) for number in range(7)]
        with pytest.raises(Overloaded):
            run.engine.submit(asked("more"))
        core.go_on()
        await run.finish(*answers)


async def test_extras_are_checked_before_vllm_has_anything(model: str) -> None:
    arguments = with_args(QUIET, logits_processors=["site.force:Force"])
    async with running(Harness(model, arguments)) as (run, core):
        force = {"name": "Force", "args": {"token": 5}}
        for extra in ({"other": 1}, {"logits_processors": ["Unknown"]}, {"vllm_xargs": 7}):
            with pytest.raises((Unsupported, InvalidRequest)):
                run.engine.submit(replace(asked(), extra=extra))
        await run.answer(replace(asked(), extra={"logits_processors": [force]}))
        assert [request.sampling_params.extra_args for request in core.received] == [{"token": 5}]
