"""The engine's own process: how it ends, with whom it ends, and what it does when there is nothing to do."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from tests.unit.engines.native.shell_lab import (
    make_engine,
    pid_of,
    request,
    running,
    until_gone,
)
from tests.waits import MUST_HAPPEN_S

from kvolt.core.delta import StepOutput
from kvolt.core.errors import EngineFailed
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.engines.framing import FrameSplitter, encode_frame, encode_raw
from kvolt.engines.native.shell import engine as engine_module
from kvolt.engines.native.shell.engine_loop import EngineLoop, Pipe, ShellClosed
from kvolt.engines.native.shell.messages import CLEAR_KV, Abort, Call, Reply, Step, Stop, decode_answer
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.tasks import Scope

# --- the process dies


async def test_a_killed_process_is_reported_with_its_signal() -> None:
    async with running(process="own") as (engine, reader):
        engine.submit(request("r", tokens=200))
        await reader.until(lambda: "r" in reader.tokens)
        os.kill(pid_of(engine), signal.SIGKILL)
        await reader.until(lambda: reader.error)
        assert isinstance(reader.error, EngineFailed)
        assert "was killed by SIGKILL" in reader.error.message
        assert reader.error.fields["exit_code"] == -9


async def test_a_process_that_exits_is_reported_with_its_last_output() -> None:
    async with running(process="own") as (engine, reader):
        engine.submit(request("r", fault="exit"))
        with pytest.raises(EngineFailed, match="exited with code 7"):
            await engine.prefill(request("p"))
        await reader.until(lambda: reader.error)
        assert "last words" in str(reader.error)


async def test_a_process_that_exits_while_it_loads() -> None:
    with pytest.raises(EngineFailed, match=r"exited with code 3 while loading(.|\n)*out of something"):
        await make_engine("load_and_exit", process="own").start()


async def test_a_step_that_hangs_is_killed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_STOP_S", 0.2)
    async with running(process="own") as (engine, reader):
        engine.submit(request("r", fault="hang"))
        await asyncio.sleep(0.05)
        pid = pid_of(engine)
    await until_gone(pid)
    assert reader.error is None


async def test_a_start_that_is_cancelled_leaves_no_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = make_engine("load_for_ever", process="own")
    async with Scope("start") as scope:
        scope.start(engine.start(), "start")
        while "pid" not in caplog.text:
            await asyncio.sleep(0.01)
        pid = pid_of(engine)
        scope.cancel()
    await until_gone(pid)


# --- the shell dies

_SHELL = """
import asyncio, sys
from tests.unit.engines.native.shell_lab import Reader, make_engine, pid_of, request

async def main():
    load, fault = sys.argv[1:]
    engine = make_engine(load, process="own")
    starting = asyncio.ensure_future(engine.start())
    while engine._host is None:
        await asyncio.sleep(0.01)
    if load != "load_for_ever":
        await starting
        reading = asyncio.ensure_future(Reader(engine).run())
        engine.submit(request("r", tokens=200, fault=fault))
    await asyncio.sleep(0.3)
    print(pid_of(engine), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("load", "fault"),
    [("load", "none"), ("load", "hang"), ("load_for_ever", "none")],
    ids=["computing", "in the middle of a step", "loading"],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_outlives_the_shell(load: str, fault: str, number: signal.Signals) -> None:
    shell = await asyncio.create_subprocess_exec(sys.executable, "-c", _SHELL, load, fault, stdout=PIPE)
    assert shell.stdout is not None
    pid = int(await shell.stdout.readline())
    os.kill(pid, 0)
    shell.send_signal(number)
    await shell.wait()
    await until_gone(pid)


async def test_it_ends_with_the_socket() -> None:
    """Also where the kernel does not see to it, and in the middle of a step."""
    async with running(process="own") as (engine, reader):
        engine.submit(request("r", fault="hang"))
        await asyncio.sleep(0.1)
        engine._link.close()
        await until_gone(pid_of(engine))
        await reader.until(lambda: reader.error)
        assert "exited with code 1" in str(reader.error)


# --- signals, logs, threads


async def test_ctrl_c_is_the_shells() -> None:
    async with running(process="own") as (engine, reader):
        engine.submit(request("r", tokens=60))
        for _ in range(3):
            os.kill(pid_of(engine), signal.SIGINT)
            await asyncio.sleep(0.01)
        await reader.finish("r")


async def test_what_it_logs_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    async with running(process="own") as (engine, reader):
        engine.submit(request("r", fault="log"))
        await reader.finish("r")
        records = [record for record in caplog.records if record.getMessage() == "logged as told"]
        assert [record.levelno for record in records] == [logging.WARNING]


async def test_the_number_of_threads_is_set_before_anything_is_imported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with running("load_reporting_threads", process="own", threads=3):
        assert "OMP_NUM_THREADS=3" in caplog.text


async def test_garbage_is_collected_after_loading_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with running("load_reporting_collector", process="own") as (engine, reader):
        engine.submit(request("r"))
        await reader.finish("r")
        assert "collector while loading: False" in caplog.text
        assert "collector while serving: True, frozen: True" in caplog.text


def test_the_same_on_uvloop() -> None:
    async def main() -> None:
        async with running(process="own") as (engine, reader):
            engine.submit(request("r", tokens=60))
            await reader.finish("r")
            os.kill(pid_of(engine), signal.SIGKILL)
            await reader.until(lambda: reader.error)
            assert "was killed by SIGKILL" in str(reader.error)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# --- the loop


class _Stub:
    """A core that does as it is told."""

    def __init__(self, *, has_work: bool) -> None:
        self.has_work = has_work
        self.num_steps = 0
        self.outputs: list[StepOutput] = []
        self.capabilities: Any = SimpleNamespace(prefills=SimpleNamespace(next_expiry=None))

    def step(self) -> StepOutput | None:
        self.num_steps += 1
        return self.outputs.pop(0) if self.outputs else None

    def abort(self, request_id: RequestId) -> None:
        pass

    def load(self) -> WorkerLoad:
        return WorkerLoad()


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + MUST_HAPPEN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _run(core: Any, wait: Callable[[], object], then: bytes, first: bytes = b"") -> list[object]:
    """What the loop says until it is stopped: after `wait`, and after its answer to `first`."""
    ours, theirs = socket.socketpair()
    with ours:
        loop = EngineLoop(Pipe(theirs), core, SystemClock())
        errors: list[BaseException] = []

        def run() -> None:
            try:
                loop.run()
            except ShellClosed as error:
                errors.append(error)
            finally:
                theirs.close()

        thread = threading.Thread(target=run)
        thread.start()
        ours.sendall(first)
        wait()
        if first:
            assert select.select([ours], [], [], MUST_HAPPEN_S)[0]
        ours.sendall(then)
        if not then:
            ours.shutdown(socket.SHUT_RDWR)
        said = b""
        while then and (data := ours.recv(65536)):
            said += data
        thread.join(MUST_HAPPEN_S)
        assert not thread.is_alive()
        return [*map(decode_answer, FrameSplitter().feed(said)), *errors]


def _no_wait() -> None:
    """Go on at once."""


def test_a_core_at_rest_is_left_alone() -> None:
    core = _Stub(has_work=False)
    assert _run(core, lambda: time.sleep(0.1), bytes(encode_frame(Stop()))) == []
    assert core.num_steps <= 1


def test_a_core_that_is_stuck_is_asked_now_and_then() -> None:
    """Blocks are held, or a grammar is being compiled: the end of that is not announced."""
    core = _Stub(has_work=True)
    started_at = time.monotonic()
    assert _run(core, lambda: _until(lambda: core.num_steps >= 2), bytes(encode_frame(Stop()))) == []
    assert core.num_steps <= 2 + (time.monotonic() - started_at) / 0.01, "it waits between two steps"


def test_a_hold_that_runs_out_wakes_it() -> None:
    core = _Stub(has_work=False)
    core.capabilities.prefills.next_expiry = time.monotonic() + 0.05
    _run(core, lambda: _until(lambda: core.num_steps >= 2), bytes(encode_frame(Stop())))


def test_outputs_are_sent_in_order() -> None:
    core = _Stub(has_work=True)
    core.outputs = [StepOutput(load=WorkerLoad(running=number)) for number in range(1, 6)]
    said = _run(core, lambda: _until(lambda: not core.outputs), bytes(encode_frame(Stop())))
    assert [step.load.running for step in said if isinstance(step, Step) and step.load] == [1, 2, 3, 4, 5]


def test_it_is_heard_of_that_a_request_went_though_no_load_changed() -> None:
    """One that waited for its grammar was in no step: who waits for one would take the engine for stuck."""
    abort = bytes(encode_frame(Abort(RequestId("a"))))
    said = _run(_Stub(has_work=False), _no_wait, bytes(encode_frame(Stop())), first=abort)
    assert [step.load for step in said if isinstance(step, Step)] == [WorkerLoad()]


def test_a_result_that_cannot_be_sent_fails_its_call_only() -> None:
    core = _Stub(has_work=False)
    core.capabilities.clear_kv = lambda: 1 << 80
    call = bytes(encode_frame(Call(1, CLEAR_KV.name, encode_raw(()))))
    (reply,) = _run(core, _no_wait, bytes(encode_frame(Stop())), first=call)
    assert isinstance(reply, Reply)
    assert reply.error is not None
    assert "clear_kv failed" in reply.error.message


def test_the_loop_ends_with_the_socket() -> None:
    assert [type(error) for error in _run(_Stub(has_work=False), _no_wait, b"")] == [ShellClosed]
