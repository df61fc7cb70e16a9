"""docs/journey.md against a real request: every function it names is called, in that order."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from prometheus_client import CollectorRegistry

from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.frontend.admission import Admission, WorkerLoads
from kvolt.frontend.app import FrontendApp
from kvolt.frontend.generate import GenerateOptions, Generation
from kvolt.frontend.metrics.edge_metrics import FrontendMetrics
from kvolt.frontend.models import Models
from kvolt.runtime.clock import SystemClock, ThreadBlocking, new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.http.server import HttpServer
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import SocketNetwork, split_address
from kvolt.runtime.plane.connections import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.tasks import Crew
from kvolt.worker.worker import Worker

PAGE = Path(__file__).parents[2] / "docs" / "journey.md"


def named_functions(section: str) -> list[str]:
    text = PAGE.read_text().split(f"## {section}")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([\w.]+:[\w.]+)`", text, re.M)


def code_of(name: str) -> CodeType | None:
    module, _, path = name.partition(":")
    thing: Any = importlib.import_module(module)
    for part in path.split("."):
        thing = getattr(thing, part)
    return getattr(thing, "__code__", None)


def test_every_name_on_the_page_exists() -> None:
    names = named_functions("One request") + named_functions("One block")
    assert len(names) > 25
    for name in names:
        code_of(name)


async def test_a_request_takes_the_way_that_the_page_tells() -> None:
    clock, network, blocking = SystemClock(), SocketNetwork(), ThreadBlocking(1)
    store, bus = MemStore(), MemBus()

    def runtime(name: str) -> Runtime:
        rng = random.Random(name)
        ports = Ports(
            clock,
            rng,
            network,
            blocking,
            tcp_plane(network),
            lambda plane: MemDiscovery(store, clock, rng),
            lambda discovery: MemEvents(bus, new_id(rng)),
        )
        return Runtime(ports, ProcessOptions(name))

    edge, back = runtime("edge"), runtime("back")
    await edge.start()
    await back.start()
    spec = EngineSpec(model="sim-tiny", role=Role.AGGREGATED)
    worker = Worker(back, SimEngine(spec, SimArguments(speed=100)), "default")
    await worker.start()
    crew = Crew("test")
    crew.start(worker.run(), "worker")
    models = Models(edge, "default")
    models.start()
    admission = Admission(WorkerLoads(), 10)
    generation = Generation(edge, models, admission, FrontendMetrics(), GenerateOptions())
    app = FrontendApp(models, generation, admission, Metrics(CollectorRegistry()), 0)
    server = HttpServer(network, app.routes(), clock)
    address = await server.start("127.0.0.1:0")
    async with asyncio.timeout(10):
        while not models.ready():
            await asyncio.sleep(0.01)

    wanted = {code: name for name in named_functions("One request") if (code := code_of(name))}
    called: dict[str, None] = {}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in wanted:
            called.setdefault(wanted[frame.f_code])

    reader, writer = await asyncio.open_connection(*split_address(address))
    body = json.dumps(
        {
            "model": "sim-tiny",
            "messages": [{"role": "user", "content": "hi " * 40}],
            "max_tokens": 3,
            "stream": True,
        }
    )
    sys.setprofile(profile)
    try:
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        answer = await asyncio.wait_for(reader.readuntil(b"data: [DONE]"), 10)
    finally:
        sys.setprofile(None)
    writer.close()
    await server.close()
    await models.close()
    await edge.close()
    await back.close()
    await worker.close()
    await crew.close()
    blocking.close()

    assert answer.startswith(b"HTTP/1.1 200")
    assert list(called) == named_functions("One request")
