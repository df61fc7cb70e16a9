"""NativeEngine over the fake core: rejected requests, reported steps, its end. Tests of processes are in
test_process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import threading
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.native.shell_lab import Reader, make_engine, pid_of, request, running, until_gone
from tests.unit.transfer.device_lab import FakeDevice

from kvolt.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    Unsupported,
)
from kvolt.core.ids import RequestId, SequenceHash
from kvolt.core.request import MediaSpan, Sampling
from kvolt.engines.contract import features_of
from kvolt.engines.native.shell import core_calls, messages
from kvolt.engines.native.shell import engine as engine_module
from kvolt.engines.native.shell import link as link_module
from kvolt.runtime.tasks import Scope
from kvolt.transfer.memory.device_memory import DeviceHandle
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.slabs import Slab

MODES = pytest.mark.parametrize("process", ["thread", "own"])


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- start


async def test_nothing_is_known_before_the_start() -> None:
    engine = make_engine()
    with pytest.raises(EngineFailed, match="has not been started"):
        _ = engine.card
    with pytest.raises(EngineFailed):
        engine.submit(request("r"))
    of_blocks = ("KvEvents", "KvVisible", "KvMovable", "KvAddressable", "KvTierable")
    assert features_of(engine) == (*of_blocks, "Prefill", "Lora", "Embed")
    await engine.close()
    with pytest.raises(EngineFailed):
        await engine.start()


@MODES
async def test_loading_progress_is_logged(process: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running("load_slowly", process=process) as (engine, _):
        lines = [record.getMessage() for record in caplog.records if "of 40" in record.getMessage()]
        assert (lines[0], lines[-1]) == ("layer 0 of 40", "layer 39 of 40")
        assert engine.card.name == "fake"


@MODES
async def test_the_step_model_follows_the_steps(process: str) -> None:
    async with running("load_measured", process=process) as (engine, reader):
        measured = engine.latency
        assert measured is not None
        assert measured.base_s == 10.0
        engine.submit(request("a", tokens=12))
        await reader.finish("a")
        assert engine.latency is not None
        assert engine.latency.base_s < 5.0
    async with running(process=process) as (engine, _):
        assert engine.latency is None, "nothing was measured"


@MODES
async def test_a_wrong_setting_comes_out_as_it_was_raised(process: str) -> None:
    engine = make_engine("load_unknown", model="no-such-model", process=process)
    with pytest.raises(ConfigError, match="there is no model 'no-such-model'") as caught:
        await engine.start()
    assert caught.value.fields == {"key": "model", "remedy": "name a folder"}


@MODES
async def test_a_bug_in_loading_is_logged_with_its_traceback(
    process: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineFailed, match="ZeroDivisionError: a bug in loading"):
        await make_engine("load_with_a_bug", process=process).start()
    assert "in load_with_a_bug" in caplog.text


async def test_what_is_not_installed_is_named() -> None:
    engine = make_engine()
    engine._core = "kvolt_no_such_package.core:load"
    with pytest.raises(ConfigError, match="kvolt_no_such_package") as caught:
        await engine.start()
    assert "pip install" in str(caught.value.fields["remedy"])


async def test_it_is_started_once() -> None:
    async with running() as (engine, _):
        with pytest.raises(EngineFailed, match="once"):
            await engine.start()


@MODES
async def test_nothing_is_left_behind(process: str) -> None:
    before, num_threads = open_descriptors(), threading.active_count()
    for load in ("load", "load_unknown", "load_with_a_bug"):
        engine = make_engine(load, process=process)
        with contextlib.suppress(KvoltError):
            await engine.start()
        await engine.close()
        await engine.close()
    await asyncio.sleep(0)
    assert open_descriptors() == before
    if process == "thread":
        assert threading.active_count() == num_threads


# --- requests


async def test_submit_refuses_what_can_never_run() -> None:
    async with running(max_num_seqs=2, max_waiting=3) as (engine, reader):
        good = request("good", tokens=200)
        engine.submit(good)
        for bad, kind in (
            (good, InvalidRequest),
            (replace(good, request_id=RequestId("x"), token_ids=()), InvalidRequest),
            (request("x", tokens=1000), InvalidRequest),
            (replace(request("x"), token_ids=(5000,)), InvalidRequest),
            (request("x", lora="unknown"), InvalidRequest),
            (replace(request("x"), media=(MediaSpan(0, 1, b"digest of sixteen"),)), Unsupported),
        ):
            with pytest.raises(kind):
                engine.submit(bad)
        for number in range(2):
            engine.submit(request(f"r{number}", choices=2))
        with pytest.raises(Overloaded):  # five are here: two run, three wait
            engine.submit(request("one-more"))
        engine.abort(good.request_id)
        engine.submit(request("one-more"))
        await reader.finish("r0", "r1", "one-more")
        assert not reader.failed


async def test_a_burst_is_taken_before_the_first_step() -> None:
    """As many as run and wait together, none of which has begun."""
    async with running(max_num_seqs=4, max_waiting=6) as (engine, reader):
        for number in range(10):
            engine.submit(request(f"r{number}"))
        with pytest.raises(Overloaded):
            engine.submit(request("r10"))
        await reader.finish(*(f"r{number}" for number in range(10)))
        assert not reader.failed


@MODES
async def test_what_the_core_refuses_fails_alone(process: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running(process=process) as (engine, reader):
        engine.submit(request("good"))
        engine.submit(request("refused", fault="refuse"))
        engine.submit(request("tripped", fault="trip"))
        await reader.finish("good")
        await reader.until(lambda: len(reader.failed) == 2)
        assert reader.failed["refused"].code == "unsupported"
        assert reader.failed["tripped"].code == "engine_failed"
        assert "tripped as told" in caplog.text
        engine.submit(request("refused"))
        await reader.finish("refused")


@MODES
async def test_tokens_come_in_order(process: str) -> None:
    async with running(process=process) as (engine, reader):
        for number in range(40):
            engine.submit(request(f"r{number}", prompt=10 + number, tokens=20))
        await reader.finish(*(f"r{number}" for number in range(40)))
        alone = dict(reader.tokens)
        assert {len(tokens) for tokens in alone.values()} == {20}
        engine.submit(request("again", prompt=27, tokens=20))
        await reader.finish("again")
        assert reader.tokens["again"] == alone["r17"]


async def test_the_same_batch_is_the_same_object() -> None:
    async with running() as (engine, reader):
        engine.submit(request("a", tokens=30))
        engine.submit(request("b", tokens=30))
        await reader.finish("a", "b")
        batches = [step.plain_ids for step in reader.steps if len(step.plain_ids) == 2]
        assert len(batches) > 20
        assert len({id(batch) for batch in batches}) == 1


@MODES
async def test_no_output_after_an_abort(process: str) -> None:
    async with running(process=process) as (engine, reader):
        for turn in range(20):
            names = [f"r{turn}-{number}" for number in range(6)]
            for number, name in enumerate(names):
                engine.submit(request(name, prompt=20 + number, tokens=50, choices=1 + number % 2))
            awaited = names[turn % 6]
            await reader.until(lambda awaited=awaited: awaited in reader.tokens)
            told = {name: len(reader.tokens.get(name, [])) for name in names}
            for name in names:
                engine.abort(RequestId(name))
            await asyncio.sleep(0.002)
            assert {name: len(reader.tokens.get(name, [])) for name in names} == told


async def test_steps_that_were_not_read_yet_are_cleaned_as_well() -> None:
    engine = make_engine()
    await engine.start()
    engine.submit(request("stays", tokens=6))
    engine.submit(request("goes", tokens=6))
    while len(engine._steps) < 6:
        await asyncio.sleep(0.001)
    engine.abort(RequestId("goes"))
    reader = Reader(engine)
    async with Scope("read") as scope:
        scope.start(reader.run(), "steps")
        await reader.finish("stays")
        await engine.close()
    assert list(reader.tokens) == ["stays"]
    assert len(reader.tokens["stays"]) == 6


async def test_an_id_is_free_after_an_abort() -> None:
    async with running() as (engine, reader):
        engine.submit(request("first", prompt=30, tokens=20))
        await reader.finish("first")
        for _ in range(5):
            reader.tokens.clear()
            engine.submit(request("same", prompt=60, tokens=100))
            await reader.until(lambda: "same" in reader.tokens)
            engine.abort(RequestId("same"))
            reader.tokens.pop("same")
            reader.ended.clear()
            engine.submit(request("same", prompt=30, tokens=20))
            await reader.finish("same")
            assert len(reader.tokens["same"]) == 20


async def test_the_load_is_true_when_all_were_aborted() -> None:
    """No step comes after the last of them, and yet the load must not stand at what it was."""
    async with running() as (engine, reader):
        engine.submit(request("r", tokens=200))
        await reader.until(lambda: reader.load.running == 1)
        engine.abort(RequestId("r"))
        await reader.until(lambda: (reader.load.running, reader.load.kv_used_blocks) == (0, 0))


async def test_withdraw() -> None:
    async with running(max_num_seqs=1) as (engine, reader):
        engine.submit(request("runs", tokens=100))
        await reader.until(lambda: "runs" in reader.tokens)
        engine.submit(request("waits"))
        engine.submit(request("cancelled"))
        assert await engine.withdraw(RequestId("waits"))
        assert not await engine.withdraw(RequestId("waits"))
        assert not await engine.withdraw(RequestId("runs"))
        async with Scope("withdraw") as scope:
            scope.start(engine.withdraw(RequestId("cancelled")), "withdraw")
            await asyncio.sleep(0)
            scope.cancel()
        await engine.match(request("x"))  # commands before it are answered
        engine.submit(request("cancelled"))  # so its id is free
        engine.abort(RequestId("runs"))
        await reader.finish("cancelled")
        assert "waits" not in reader.tokens


@MODES
async def test_large_steps_pass(process: str) -> None:
    """Megabytes in one step, while others go on."""
    async with running(process=process, context_length=20_000, kv_blocks=6000, max_batch_tokens=8192) as (
        engine,
        reader,
    ):
        engine.submit(request("small", tokens=50))
        engine.submit(request("large", prompt=8000, tokens=3, prompt_logprobs=20))
        await reader.finish("small", "large")
        deltas = [delta for step in reader.steps for name, delta in step.deltas if name == "large"]
        assert deltas[0].prompt_logprobs is not None
        assert len(deltas[0].prompt_logprobs) == 8000
        assert len(reader.tokens["small"]) == 50


async def test_an_engine_pauses_while_its_steps_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues once they are read, and no step is lost."""
    monkeypatch.setattr(engine_module, "_MAX_UNREAD_STEPS", 8)
    engine = make_engine(context_length=4000, kv_blocks=2000)
    await engine.start()
    engine.submit(replace(request("r", tokens=1000), sampling=Sampling(logprobs=200)))
    num_steps = 0
    while not num_steps or len(engine._steps) > num_steps:
        num_steps = len(engine._steps)
        await asyncio.sleep(0.1)
    assert 8 <= num_steps < 500
    reader = Reader(engine)
    async with Scope("read") as scope:
        scope.start(reader.run(), "steps")
        await reader.finish("r")
        await engine.close()
    assert len(reader.tokens["r"]) == 1000


async def test_requests_are_refused_while_the_pipe_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_BUFFER_BYTES", 10_000)
    monkeypatch.setattr(engine_module, "_STOP_S", 0.1)
    async with running(process="own", context_length=200_000, kv_blocks=60_000) as (engine, _):
        engine.submit(request("hangs", tokens=2, fault="hang"))
        with pytest.raises(Overloaded, match="command buffer is full"):
            for number in range(200):
                engine.submit(request(f"r{number}", prompt=20_000))
        engine.abort(RequestId("r0"))


# --- calls


async def test_calls_and_their_errors(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as (engine, reader):
        assert await engine.embed([[1], [1, 2]]) == [[1.0, 1.0], [1.0, 2.0]]
        with pytest.raises(InvalidRequest):
            await engine.embed([[]])
        with pytest.raises(EngineFailed, match="embed failed"):
            await engine.embed([[1]], "last")
        assert "a fault in the core" in caplog.text
        engine.submit(request("r"))
        await reader.finish("r")


async def test_adapters() -> None:
    async with running() as (engine, reader):
        with pytest.raises(InvalidRequest):
            await engine.load_lora("one", "broken")
        await engine.load_lora("one", "here")
        await engine.load_lora("two", "there")
        assert engine.loras() == ("one", "two")
        engine.submit(request("r", prompt=20, lora="one"))
        await reader.finish("r")
        asked = request("x", prompt=20, lora="one")
        assert await engine.match(asked) == 20
        assert len(engine.kv_keys(asked)) == 5
        assert engine.kv_keys(asked) != engine.kv_keys(request("x", prompt=20))
        with pytest.raises(NotFound):
            await engine.unload_lora("three")
        await engine.unload_lora("one")
        assert engine.loras() == ("two",)
        with pytest.raises(InvalidRequest, match="loaded: two"):
            engine.submit(asked)
        with pytest.raises(InvalidRequest):
            engine.kv_keys(asked)


async def test_a_prefill_that_is_cancelled_is_taken_back() -> None:
    async with running(max_num_seqs=1) as (engine, reader):
        engine.submit(request("runs", tokens=30))
        async with Scope("prefill") as scope:
            scope.start(engine.prefill(request("same", prompt=20)), "prefill")
            await reader.until(lambda: reader.load.waiting == 1)
            scope.cancel()
        engine.submit(request("same", prompt=20))
        await reader.finish("runs", "same")
        await reader.until(lambda: reader.load.kv_used_blocks == 0)
        assert not reader.failed


@MODES
async def test_the_blocks_of_a_prompt_are_reported_while_it_is_computed(process: str) -> None:
    async with running(process=process, max_batch_tokens=16) as (engine, reader):
        async with Scope("prefill") as scope:
            scope.start(engine.prefill(request("p", prompt=161)), "prefill")
            await asyncio.sleep(0)
            told = [await engine.computed_kv(RequestId("p"), 0)]
            while len(told[-1].blocks) < 40:
                told.append(await engine.computed_kv(RequestId("p"), len(told[-1].blocks)))
        assert len(told) > 1
        last = await engine.computed_kv(RequestId("p"), 40)
        assert last == told[-1] == await engine.held_kv(RequestId("p"))
        await engine.release_prefill(RequestId("p"))
        with pytest.raises(NotFound):
            await engine.computed_kv(RequestId("p"), 0)
        await reader.until(lambda: reader.load.kv_used_blocks == 0)


async def test_who_waits_for_blocks_hears_that_the_engine_was_closed() -> None:
    async with running(max_num_seqs=1) as (engine, reader):
        engine.submit(request("runs", tokens=200))
        async with Scope("prefill") as scope:
            scope.start(_error_of(engine.prefill(request("p", prompt=20))), "prefill")
            waiting = scope.start(_error_of(engine.computed_kv(RequestId("p"), 0)), "blocks")
            await reader.until(lambda: reader.load.waiting == 1)
            await engine.close()
        assert isinstance(waiting.result(), EngineFailed)


async def test_a_call_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages.MATCH, "timeout_s", 0.05)
    monkeypatch.setattr(engine_module, "_STOP_S", 0.1)
    async with running(process="own") as (engine, _):
        engine.submit(request("hangs", fault="hang"))
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlineExceeded, match="match"):
            await engine.match(request("x"))


@MODES
async def test_the_blocks_lie_in_memory_of_the_shell(process: str) -> None:
    async with running(process=process) as (engine, reader):
        engine.submit(request("r", prompt=20))
        await reader.finish("r")
        (slab,), (descriptor,) = engine.kv_slabs(), engine.kv_memories
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
            assert any(slab.memory)
            assert bytes(slab.memory) == memory[: len(slab.memory)]
    assert engine.kv_memories == ()


@MODES
async def test_each_rank_has_a_slab_in_memory_of_the_shell(process: str) -> None:
    before = open_descriptors()
    async with running("load_two_ranks", process=process, tensor_parallel=2) as (engine, _):
        first, second = engine.kv_slabs()
        assert engine.kv_slabs() == (first, second)
        assert [slab.layout and slab.layout.tp_rank for slab in (first, second)] == [0, 1]
        assert bytes(second.memory[:6]) == b"rank 1"
        assert not any(first.memory[:6])
        assert first.num_blocks == second.num_blocks
    assert open_descriptors() <= before


@MODES
async def test_a_rank_that_has_its_blocks_elsewhere_leaves_no_slabs(process: str) -> None:
    async with running("load", process=process, tensor_parallel=2) as (engine, _):
        with pytest.raises(Unsupported, match="not in memory that other processes can map"):
            engine.kv_slabs()


@MODES
async def test_blocks_that_came_for_a_request_go_when_it_is_refused(process: str) -> None:
    """By the core, when the worker has handed it over already."""
    async with running(process=process) as (engine, reader):
        given = request("r", prompt=20, fault="refuse")
        keys = engine.kv_keys(given)
        room = await engine.allocate_kv(keys, [SequenceHash(each) for each in range(len(keys))])
        await engine.commit_kv(room, len(room.blocks), given.request_id)
        engine.submit(given)
        await reader.until(lambda: "r" in reader.failed)
        engine.submit(request("other", prompt=4, tokens=1))
        await reader.finish("other")
        assert reader.load.kv_used_blocks == 0


@MODES
async def test_who_goes_on_with_blocks_that_came_waits_for_no_answer_of_the_engine(
    process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which answers between two steps: the request would miss the one after its blocks."""
    async with running(process=process) as (engine, reader):
        given = request("r", prompt=20, tokens=4)
        keys = engine.kv_keys(given)
        room = await engine.allocate_kv(keys, [SequenceHash(each) for each in range(len(keys))])
        monkeypatch.setattr(engine._link, "_on_reply", lambda answer: None)
        await asyncio.wait_for(engine.commit_kv(room, 0, given.request_id), 30)
        engine.submit(given)
        monkeypatch.undo()
        await reader.finish("r")


@MODES
async def test_room_that_comes_as_its_caller_goes_is_given_back(
    process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(process=process) as (engine, reader):
        keys = engine.kv_keys(request("r", prompt=20))
        asking = asyncio.ensure_future(
            engine.allocate_kv(keys, [SequenceHash(each) for each in range(len(keys))])
        )
        on_reply = engine._link._on_reply

        def and_cancel(answer: messages.Reply) -> None:
            on_reply(answer)
            asking.cancel()

        monkeypatch.setattr(engine._link, "_on_reply", and_cancel)
        await asyncio.wait([asking])
        monkeypatch.undo()
        assert asking.cancelled()
        engine.submit(request("other", prompt=4, tokens=1))
        await reader.finish("other")
        assert reader.load.kv_used_blocks == 0


# --- blocks of a device


async def test_a_decode_worker_opens_its_engine_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device, opened = FakeDevice(4096), []

    def open_slab(handle: DeviceHandle, name: str, layout: SlabLayout) -> Slab:
        opened.append((handle.allocation, handle.offset, name))
        return Slab.on_device(device, layout.block.block_bytes, layout)

    monkeypatch.setattr(core_calls, "_open_slab", open_slab)
    async with running("load_decode_on_device", process="own") as (engine, _):
        (slab,) = engine.kv_slabs()
        assert slab.device is device
        assert opened == [(b"handle", 8, "cuda:1")]
    assert device.num_closed == 1


@pytest.mark.parametrize(
    ("load", "arguments"),
    [
        ("load_aggregated_on_device", {"process": "own"}),  # its blocks are not read
        ("load_decode_on_device", {"process": "thread"}),  # a process does not open its own memory
    ],
)
async def test_a_device_is_not_opened_where_that_is_of_no_use(
    load: str, arguments: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_calls, "_open_slab", lambda *given: pytest.fail("was opened"))
    async with running(load, **arguments) as (engine, reader):
        engine.submit(request("r"))
        await reader.finish("r")


@pytest.mark.parametrize("error", [Unsupported("not from here", feature="x"), RuntimeError("out of memory")])
async def test_a_device_that_cannot_be_opened_keeps_its_blocks(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: object) -> Slab:
        raise error

    monkeypatch.setattr(core_calls, "_open_slab", refuse)
    async with running("load_decode_on_device", process="own") as (engine, reader):
        engine.submit(request("r"))
        await reader.finish("r")
        assert all(slab.device is None for slab in engine.kv_slabs())
    assert "cannot be moved" in caplog.text


# --- end


@MODES
async def test_a_step_that_fails_is_the_end(process: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running(process=process) as (engine, reader):
        engine.submit(request("good", tokens=100))
        await reader.until(lambda: "good" in reader.tokens)
        engine.submit(request("bad", fault="raise"))
        await reader.until(lambda: reader.error)
        assert isinstance(reader.error, EngineFailed)
        assert "the step failed as told" in reader.error.message
        assert "_suffer" in caplog.text
        engine.abort(RequestId("good"))
        with pytest.raises(EngineFailed, match="the step failed"):
            engine.submit(request("late"))
        with pytest.raises(EngineFailed, match="the step failed"):
            await engine.clear_kv()


@MODES
async def test_close_while_it_computes(process: str) -> None:
    async with running(process=process) as (engine, reader):
        for number in range(10):
            engine.submit(request(f"r{number}", tokens=200))
        await reader.until(lambda: len(reader.tokens) == 10)
        async with Scope("close") as scope:
            waiting = scope.start(_error_of(engine.prefill(request("p", prompt=200))), "prefill")
            for _ in range(3):
                scope.start(engine.close(), "close")
        assert isinstance(waiting.result(), EngineFailed)
        with pytest.raises(EngineFailed, match="closed"):
            engine.submit(request("late"))
    assert reader.error is None
    assert not reader.ended


async def _error_of(call: Any) -> Exception | None:
    try:
        await call
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.05, 0.3])
async def test_close_while_it_starts(after_s: float) -> None:
    before = open_descriptors()
    engine = make_engine("load_for_ever", process="own")
    async with Scope("close") as scope:
        starting = scope.start(_error_of(engine.start()), "start")
        await asyncio.sleep(after_s)
        await engine.close()
    assert isinstance(starting.result(), EngineFailed)
    if engine._host is not None:
        await until_gone(pid_of(engine))
    await asyncio.sleep(0)
    assert open_descriptors() == before
