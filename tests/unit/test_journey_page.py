"""docs/journey.md against real requests: every function it names is called, in that order.

The path is HTTP, the `latency` router, a prefill and a decode worker with the native engine. The engines run in threads
here, so that one process sees all calls.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import re
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.unit.engines.lab import LIMITS, make_request, sim, until
from tests.unit.journey.stage import Fixed, Inbox, Stage, staged

from kvolt.cli.worker.transfers import Transfers
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.shell.engine import NativeEngine
from kvolt.frontend.admission import Admission, LatestLoads
from kvolt.frontend.app import FrontendApp
from kvolt.frontend.generate import GenerateOptions, Generation
from kvolt.frontend.metrics.edge_metrics import FrontendMetrics
from kvolt.frontend.models import Models
from kvolt.journey.journey import Journey
from kvolt.router.registry import ROUTERS
from kvolt.runtime.clock import SystemClock, ThreadBlocking, new_id
from kvolt.runtime.config.settings import Settings, TransferSettings
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.http.server import HttpServer
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import SocketNetwork, split_address
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.tiny_models import tiny_checkpoint
from kvolt.worker.worker import Worker

PAGE = Path(__file__).parents[2] / "docs" / "journey.md"
PATIENCE_S = 120.0
PERIODIC = {"kvolt.runtime.plane.connection:Connection._flush"}
"""Functions that timers call as well, here for heartbeats."""
ARGUMENTS = NativeArguments(
    served_name="tiny",
    process="thread",
    device="cpu",
    dtype="float32",
    threads=1,
    kv_blocks=64,
    measure_steps=False,  # without a latency model every long prompt goes to the prefill worker
)
REQUEST = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi " * 80}],
    "max_tokens": 48,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


def numbered_functions(heading: str) -> list[str]:
    text = PAGE.read_text().split(f"# {heading}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. `(kvolt[\w.]+:[\w.]+)`", text, re.M)


def resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def code_of(name: str) -> CodeType:
    code: CodeType = resolve(name).__code__
    return code


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(kvolt\.[\w.]+:[\w.]+)`", PAGE.read_text()))))
def test_a_name_on_the_page_is_defined_in_the_module_beside_it(name: str) -> None:
    module = name.partition(":")[0]
    value = resolve(name)
    value = value.fget if isinstance(value, property) else value
    assert value.__module__ == module, f"{name} is defined in {value.__module__}"


def test_both_lists_name_functions() -> None:
    assert len(numbered_functions("One request")) > 50
    assert len(numbered_functions("One block")) > 15
    assert all(code_of(name) for name in numbered_functions("One block"))


class Recorder:
    """First calls of some functions, in order, over all threads that start after `install`.

    A call of a function in PERIODIC counts once the function before it in `names` was called.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = {_key(code_of(name)): name for name in names}
        self._predecessors = dict(zip(names[1:], names, strict=False))
        self._called: dict[str, None] = {}
        self.is_recording = False

    @property
    def called(self) -> list[str]:
        return list(self._called)

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def remove(self) -> None:
        self.is_recording = False
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if self.is_recording and event == "call":
            name = self._names.get(_key(frame.f_code))
            if name is not None and (name not in PERIODIC or self._predecessors[name] in self._called):
                self._called.setdefault(name)


def _key(code: CodeType) -> tuple[str, int, str]:
    """Equal for instrumented copies of a code object."""
    return code.co_filename, code.co_firstlineno, code.co_qualname


@asynccontextmanager
async def serving(model: Path, roles: Sequence[Role]) -> AsyncIterator[str]:
    """HTTP address of a frontend with a worker of each role, all in this process."""
    clock, network, blocking = SystemClock(), SocketNetwork(), ThreadBlocking(1)
    store, bus = MemStore(), MemBus()

    def new_runtime(name: str) -> Runtime:
        rng = random.Random(name)
        ports = Ports(
            clock,
            rng,
            network,
            blocking,
            tcp_plane(network),
            lambda plane: MemDiscovery(store, clock, rng),
            lambda discovery, plane, server: MemEvents(bus, new_id(rng)),
        )
        return Runtime(ports, ProcessOptions(name))

    async with AsyncExitStack() as stack:
        stack.callback(blocking.close)
        tasks = TaskGroup("test")
        stack.push_async_callback(tasks.close)
        for role in roles:
            runtime = new_runtime(role.value)
            await runtime.start()
            transfers = Transfers(runtime, TransferSettings())
            engine = NativeEngine(EngineSpec(model=str(model), role=role), ARGUMENTS)
            worker = Worker(runtime, engine, "default", None, transfers.mover)
            stack.push_async_callback(worker.close)
            stack.push_async_callback(transfers.close)
            stack.push_async_callback(runtime.close)
            await worker.start()
            tasks.start(worker.run(), role.value)
        edge = new_runtime("edge")
        await edge.start()
        stack.push_async_callback(edge.close)
        models = Models(edge, "default", None, ROUTERS[Settings().frontend.router])
        models.start()
        stack.push_async_callback(models.close)
        admission = Admission(LatestLoads(), 10)
        generation = Generation(edge, models, admission, FrontendMetrics(), GenerateOptions())
        app = FrontendApp(models, generation, admission, Metrics(CollectorRegistry()), 0)
        server = HttpServer(network, app.routes(), clock)
        stack.push_async_callback(server.close)
        while not models.ready() or len(models.ready()[0].workers()) < len(roles):
            await asyncio.sleep(0.01)
        yield await server.start("127.0.0.1:0")


async def called_by_a_request(names: list[str], model: Path, roles: Sequence[Role]) -> list[str]:
    """The functions of `names` that a request calls, in the order of their first calls."""
    recorder = Recorder(names)
    recorder.install()
    try:
        async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
            address = await stack.enter_async_context(serving(tiny_checkpoint(model), roles))
            reader, writer = await asyncio.open_connection(*split_address(address))
            stack.push_async_callback(writer.wait_closed)
            stack.callback(writer.close)
            body = json.dumps(REQUEST)
            recorder.is_recording = True
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
            )
            answer = await reader.readuntil(b"data: [DONE]")
            recorder.remove()
    finally:
        recorder.remove()

    assert answer.startswith(b"HTTP/1.1 200")
    return recorder.called


async def test_a_request_calls_the_functions_of_the_page_in_order(tmp_path: Path) -> None:
    names = numbered_functions("One request")
    assert await called_by_a_request(names, tmp_path / "tiny", (Role.PREFILL, Role.DECODE)) == names


async def test_a_worker_without_a_role_leaves_out_the_steps_that_the_page_says(tmp_path: Path) -> None:
    names = numbered_functions("One request")
    text = " ".join(PAGE.read_text().split())
    numbers = re.search(r"leaves out the handoff, which is steps ([\d, ]+(?:(?:to|and) [\d, ]+)+):", text)
    assert numbers is not None
    left_out = [
        names[number - 1]
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", numbers[1])
        for number in range(int(first), int(last or first) + 1)
    ]
    called = await called_by_a_request(names, tmp_path / "tiny", (Role.AGGREGATED,))
    assert sorted({*names} - {*called}) == sorted(left_out)


def test_the_loss_of_a_worker_calls_the_functions_of_the_page_in_order() -> None:
    names = numbered_functions("Failures")
    recorder = Recorder(names)

    async def body(stage: Stage) -> None:
        inbox = Inbox()
        decisions = Fixed(stage.decision(0), stage.decision(1))

        def crash() -> None:
            if inbox.num_tokens == 3:
                recorder.is_recording = True
                stage.lab.network.crash("w0", silent=False)

        inbox.watch = crash
        journey = Journey(stage.journey_context(decisions), make_request(), inbox, LIMITS)
        await journey.start()
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.num_tokens) == ([None], 8)

    recorder.install()
    try:
        staged(body, lambda: (sim(), sim()))
    finally:
        recorder.remove()
    assert len(names) > 5
    assert recorder.called == names
