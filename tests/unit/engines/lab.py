"""Workers and a frontend in one process on virtual time: in-memory discovery, events and network.

run_virtual(lambda: scenario(...)) with `async with Lab() as lab:` inside the scenario.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import Delta, StepOutput
from kvolt.core.endpoints import GENERATE, EndpointAddress, component_name
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec, KvAddressable
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.frontend.admin.trace_recorder import TraceRecorder
from kvolt.frontend.admission import Admission, LatestLoads
from kvolt.frontend.app import build_server
from kvolt.frontend.generate import GenerateOptions
from kvolt.frontend.model import ModelOptions
from kvolt.frontend.models import Models
from kvolt.frontend.tenants.access import AccessGuard
from kvolt.frontend.tenants.live_keys import LiveKeys
from kvolt.frontend.tenants.shared_budgets import SharedBudgets
from kvolt.frontend.tenants.store import KeyStore
from kvolt.router.registry import find_router
from kvolt.runtime.clock import new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.endpoint.call import Deadlines, ResponseStream
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.http.server import HttpLimits
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import LinkProfile, VirtualNetwork, VirtualProcess
from kvolt.worker.kv.mover import KvMover
from kvolt.worker.worker import Worker, WorkerOptions

MODEL = "sim-tiny"
NAMESPACE = "test"
STEP_S = 0.01
LIMITS = Deadlines(connect_s=2.0, first_s=20.0, between_s=20.0, total_s=60.0)
ARGUMENTS = SimArguments(context_length=512, latency=LatencyModel(base_s=STEP_S))

_decode_delta = msgspec.msgpack.Decoder(Delta).decode


def sim(arguments: SimArguments = ARGUMENTS, model: str = MODEL) -> SimEngine:
    return SimEngine(EngineSpec(model=model, role=Role.AGGREGATED), arguments)


def is_empty(engine: SimEngine) -> bool:
    load = engine.load()
    return (load.running, load.waiting, load.kv_used_blocks) == (0, 0, 0)


def make_request(
    name: str = "r", *, model: str = MODEL, tokens: int = 8, seed: int = 1, prompt: int = 20, choices: int = 1
) -> Request:
    return Request(
        request_id=RequestId(name),
        model=model,
        token_ids=tuple(range(3, 3 + prompt)),
        stop=StopConditions(max_tokens=tokens),
        sampling=Sampling(seed=seed, num_choices=choices),
    )


class ScriptedEngine:
    """An engine controlled by a test: `put` a step, or an exception that it raises."""

    sampling_fields = frozenset(Sampling.__struct_fields__)

    def __init__(self, model: str = MODEL) -> None:
        self._inner = sim(model=model)
        self.outputs: asyncio.Queue[StepOutput | Exception | None] = asyncio.Queue()
        self.submitted: list[Request] = []
        self.aborted: list[RequestId] = []

    @property
    def card(self) -> ModelCard:
        return self._inner.card

    async def start(self) -> EngineInfo:
        return await self._inner.start()

    def submit(self, request: Request) -> None:
        self.submitted.append(request)

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    async def withdraw(self, request_id: RequestId) -> bool:
        return False

    async def steps(self) -> AsyncIterator[StepOutput]:
        while (step := await self.outputs.get()) is not None:
            if isinstance(step, Exception):
                raise step
            yield step

    def put(self, *outputs: StepOutput | Exception | None) -> None:
        for output in outputs:
            self.outputs.put_nowait(output)

    async def close(self) -> None:
        self.put(None)


@dataclass(slots=True)
class RunningWorker:
    runtime: Runtime
    engine: Any
    worker: Worker
    task: asyncio.Task[Any]

    @property
    def endpoint(self) -> EndpointAddress:
        info = self.worker.info
        assert info is not None
        return EndpointAddress(NAMESPACE, component_name(info.model, info.role, info.card), GENERATE)


class Lab:
    def __init__(self) -> None:
        self.network = VirtualNetwork(random.Random(1), profile=LinkProfile(latency_s=0.0005))
        self.store = MemStore()
        self.bus = MemBus()
        self.errors: list[BaseException] = []
        self._runtimes: list[Runtime] = []
        self._workers: list[RunningWorker] = []
        self._closing: list[Callable[[], Any]] = []
        self._task_group = TaskGroup("lab", on_error=self.errors.append)

    async def __aenter__(self) -> Lab:
        return self

    async def __aexit__(self, *error: object) -> None:
        for close in reversed(self._closing):
            await close()
        for runtime in self._runtimes:
            await runtime.abort()
        for running in self._workers:
            await running.worker.close()
        await self._task_group.close()
        self.network.close()

    async def runtime(self, name: str, deadlines: Deadlines = LIMITS) -> Runtime:
        process = VirtualProcess.on(self.network, name, 1)
        ports = Ports(
            process.clock,
            process.rng,
            process.network,
            process.blocking,
            tcp_plane(process.network),
            lambda plane: MemDiscovery(self.store, process.clock, process.rng),
            lambda discovery, plane, server: MemEvents(self.bus, new_id(process.rng)),
        )
        runtime = Runtime(ports, ProcessOptions(name, listen=f"{name}:0", deadlines=deadlines))
        await runtime.start()
        self._runtimes.append(runtime)
        return runtime

    async def worker(
        self,
        name: str,
        engine: Any = None,
        namespace: str = NAMESPACE,
        options: WorkerOptions | None = None,
        new_mover: Callable[[KvAddressable], KvMover] | None = None,
    ) -> RunningWorker:
        runtime = await self.runtime(name)
        engine = engine if engine is not None else sim()
        worker = Worker(runtime, engine, namespace, options, new_mover)
        await worker.start()
        running = RunningWorker(runtime, engine, worker, self._task_group.start(worker.run(), name))
        self._workers.append(running)
        return running

    async def client(self, running: RunningWorker, name: str = "caller") -> EndpointClient:
        runtime = await self.runtime(name)
        client = await runtime.client(running.endpoint)
        await until(lambda: bool(client.candidates()))
        return client

    async def frontend(
        self,
        name: str = "edge",
        options: GenerateOptions | None = None,
        model_options: ModelOptions | None = None,
        max_requests: int = 1000,
        limits: HttpLimits | None = None,
        router: str = "round-robin",
        keys: KeyStore | None = None,
    ) -> Frontend:
        """Wired as `kvolt frontend` does it."""
        runtime = await self.runtime(name)
        models = Models(runtime, NAMESPACE, model_options, find_router(router))
        models.start()
        self._closing.append(models.close)
        loads = LatestLoads()
        self._task_group.start(loads.subscribe(runtime.events), f"loads of {name}")
        admission = Admission(loads, max_requests)
        registry = CollectorRegistry()
        recorder = TraceRecorder(runtime.ports.clock.monotonic)
        recorder.register_endpoint(runtime.server)
        access = None if keys is None else await self._access(runtime, keys)
        server = build_server(
            runtime,
            models,
            admission,
            Metrics(registry),
            options or GenerateOptions(),
            limits=limits,
            recorder=recorder,
            access=access,
        )
        self._closing.append(server.close)
        address = await server.start(f"{name}:0")
        return Frontend(self, runtime, models, address, admission, registry, recorder)

    async def _access(self, runtime: Runtime, store: KeyStore) -> AccessGuard:
        """Wired as `kvolt frontend --api-keys` does it."""
        keys = LiveKeys(store, runtime.ports.blocking)
        budgets = SharedBudgets(runtime, NAMESPACE, lambda: keys.table.tenants)
        self._closing += [keys.close, budgets.close]
        await keys.start()
        await budgets.start()
        return AccessGuard(keys, budgets, runtime.ports.clock)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def start_stream(
    client: EndpointClient, request: Request, deadlines: Deadlines | None = None
) -> ResponseStream:
    return await client.stream(request, deadlines=deadlines, decode=_decode_delta)


class _Browser(asyncio.Protocol):
    def __init__(self) -> None:
        self.received = bytearray()
        self.closed = asyncio.Event()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool
    """Whether a chunked body came with its last chunk."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream, each event's data; the closing [DONE] as a string. Annotations are left out."""
        found = [event for event in self.body.decode().split("\n\n") if event.startswith("data: ")]
        data = [event.removeprefix("data: ") for event in found]
        return [event if event == "[DONE]" else json.loads(event) for event in data]

    @property
    def chunks(self) -> list[Any]:
        """The events before the closing [DONE], which must be there."""
        assert self.events[-1] == "[DONE]"
        return self.events[:-1]

    def text(self, index: int = 0) -> str:
        """The text of one choice, whatever the shape of the answer."""
        bodies = self.events[:-1] if "event-stream" in self.headers.get("content-type", "") else [self.json]
        return "".join(
            _choice_text(choice) for body in bodies for choice in body["choices"] if choice["index"] == index
        )


def _choice_text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


class Frontend:
    def __init__(
        self,
        lab: Lab,
        runtime: Runtime,
        models: Models,
        address: str,
        admission: Admission,
        registry: CollectorRegistry,
        recorder: TraceRecorder,
    ) -> None:
        self.runtime = runtime
        self.recorder = recorder
        self.models = models
        self.address = address
        self.admission = admission
        self.seen: set[str] = set()
        """For tests that collect names over several moments."""
        self._registry = registry
        self._lab = lab

    def sample(self, name: str, **labels: str) -> float:
        """A series by name, summed over the labels that are not given."""
        return sum(
            sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def exported(self) -> dict[str, float]:
        """Each family of the edge: the largest value of any of its series; of a histogram, the largest sum."""
        return {
            family.name: max(
                (
                    sample.value
                    for sample in family.samples
                    if family.type != "histogram" or sample.name.endswith("_sum")
                ),
                default=0.0,
            )
            for family in self._registry.collect()
            if family.name.startswith("kvolt_frontend")
        }

    async def ready(self, *names: str) -> None:
        wanted = list(names or (MODEL,))
        await until(lambda: [model.card.name for model in self.models.ready()] == wanted)

    @asynccontextmanager
    async def send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[_Browser]:
        """A request on its way; leaving the block hangs up."""
        host = self._lab.network.host("browser")
        browser = await host.connect(self.address, _Browser, 1.0)
        assert isinstance(browser, _Browser)
        lines = {"connection": "close", "content-length": str(len(body)), **(headers or {})}
        head = "".join([f"{name}: {value}\r\n" for name, value in lines.items()])
        browser.transport.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        try:
            yield browser
        finally:
            browser.transport.abort()

    async def ask(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None
    ) -> Answer:
        """POST what is not None, GET otherwise; bytes go as they are."""
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.send(method or ("GET" if body is None else "POST"), path, raw, headers) as browser:
            async with asyncio.timeout(120):
                await browser.closed.wait()
            return _parse(bytes(browser.received))

    async def complete(self, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
        return await self.ask("/v1/completions", {"model": MODEL, "prompt": "the water", **fields}, headers)

    async def chat(self, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
        messages = [{"role": "user", "content": "the water"}]
        body = {"model": MODEL, "messages": messages, **fields}
        return await self.ask("/v1/chat/completions", body, headers)


def _parse(raw: bytes) -> Answer:
    head, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    whole = True
    body = rest
    if headers.get("transfer-encoding") == "chunked":
        body, whole = b"", False
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            body, rest, whole = body + rest[:length], rest[length + 2 :], length == 0
    return Answer(int(status.split()[1]), headers, body, whole)
