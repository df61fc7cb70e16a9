"""A model served within the caller's process: one worker, and the frontend's path of a request to it.

The parts are those of `kvolt worker` and `kvolt frontend`, with one event loop, in-memory discovery and events, and
socket pairs instead of ports. There is no second implementation of templates, checks, tokens, routing or errors.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from kvolt.api.local_network import LocalNetwork
from kvolt.api.results import RequestOutput, ResultAnswer
from kvolt.api.sampling_params import (
    ChatOptions,
    Message,
    Params,
    Prompt,
    chat_body,
    checked_prompt,
    completion_body,
)
from kvolt.core.errors import ConfigError, KvoltError, Unavailable, Unsupported
from kvolt.core.request import Role
from kvolt.engines.contract import Embed, Engine, EngineSpec
from kvolt.engines.registry import AUTO, build_engine, choose_engine, find_engine
from kvolt.frontend.admission import Admission, LatestLoads
from kvolt.frontend.generate import GenerateOptions, Generation, record_usage
from kvolt.frontend.metrics.edge_metrics import FrontendMetrics
from kvolt.frontend.model import Model, ModelOptions
from kvolt.frontend.models import Models
from kvolt.models.resolve import check_name, recommended_defaults
from kvolt.runtime.clock import SystemClock, ThreadBlocking, new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.http.protocol import HttpRequest
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.tasks import Scope, TaskGroup
from kvolt.worker.served_card import ServedModel
from kvolt.worker.worker import Worker, WorkerOptions

DEFAULT_MODEL = "smollm2-135m"
_NAMESPACE = "local"
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_NO_DEADLINE_S = 7 * 86_400.0
"""A prompt of a batch may wait for hours until those before it are computed."""
_READY_S = 60.0
_SEQUENCES_PER_SLOT = 2
"""Requests at the engine per sequence that it can run, so that the next one waits there when a sequence ends."""


class EngineChoice:
    """Model, engine and engine arguments; raises ConfigError if they are invalid."""

    def __init__(
        self, model: str | None, engine: str, devices: Sequence[str], arguments: Mapping[str, Any]
    ) -> None:
        with _remedies():
            self.model, self.engine = _choose(model, engine, devices, arguments)


def _choose(
    model: str | None, engine: str, devices: Sequence[str], arguments: Mapping[str, Any]
) -> tuple[str, Engine]:
    if model is None:
        model = DEFAULT_MODEL if engine == AUTO else find_engine(engine).default_model
    if model is None:
        raise ConfigError(f"the engine {engine!r} has no default model", key="model", remedy="name a model")
    name, implied = choose_engine(engine, model)
    if name == "native":
        check_name(model)
    spec = EngineSpec(model=model, role=Role.AGGREGATED, devices=tuple(devices))
    return model, build_engine(name, spec, {**implied, **arguments})


@contextmanager
def _remedies() -> Iterator[None]:
    """Add the remedy of a ConfigError to its message."""
    try:
        yield
    except ConfigError as error:
        remedy = error.fields.get("remedy")
        if remedy:
            error.message = f"{error.message}; {remedy}"
            error.args = (error.message,)
        raise


class LocalServer:
    """See the module. `start` and `close` on one event loop; a closed server cannot be started again."""

    def __init__(self, choice: EngineChoice) -> None:
        self._engine = choice.engine
        self._requested = choice.model
        self._has_started = False
        self._is_closed = False
        self._stack = AsyncExitStack()
        self._rng = random.Random(secrets.randbits(128))
        self._generation: Generation | None = None
        self._model: Model | None = None
        self._worker: Worker | None = None
        self._starting = TaskGroup("start", on_error=lambda error: None)  # raised to the caller
        self._requests = TaskGroup("requests", on_error=lambda error: None)  # raised to the caller

    async def start(self) -> None:
        """Load the model. Raises ConfigError or the engine's error, and then leaves nothing running."""
        if self._is_closed or self._has_started:
            raise Unavailable("this engine was started before", reason="started")
        self._has_started = True
        start = self._starting.start(self._start(), "start")
        try:
            await asyncio.wait([start])
            if start.cancelled():
                raise Unavailable("the engine was closed while it started", reason="closed")
            with _remedies():
                start.result()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        push = self._stack.push_async_callback
        clock, blocking = SystemClock(), ThreadBlocking()
        self._stack.callback(blocking.close)
        store, bus, network = MemStore(), MemBus(), LocalNetwork()
        ports = Ports(
            clock,
            self._rng,
            network,
            blocking,
            tcp_plane(network),
            lambda plane: MemDiscovery(store, clock, self._rng),
            lambda discovery, plane, server: MemEvents(bus, new_id(self._rng)),
        )
        deadlines = Deadlines(first_s=_NO_DEADLINE_S, between_s=_NO_DEADLINE_S, total_s=_NO_DEADLINE_S)
        behind, front = (
            Runtime(ports, ProcessOptions(name, deadlines=deadlines, announce_s=0.0, stall_grace_s=0.0))
            for name in ("worker", "frontend")
        )
        served = ServedModel(generation_defaults=recommended_defaults(self._requested))
        worker = self._worker = Worker(behind, self._engine, _NAMESPACE, WorkerOptions(served=served))
        tasks = TaskGroup("local worker", on_error=lambda error: None)  # the worker has logged it
        push(tasks.close)
        push(worker.close)
        push(behind.abort)
        await behind.start()
        await worker.start()
        tasks.start(worker.run(), "run")
        push(front.abort)
        await front.start()
        models = Models(front, _NAMESPACE, ModelOptions(max_attempts=1, migration_limit=0))
        push(models.close)
        models.start()
        await models.wait_settled(_READY_S)
        self._model = models.single_model()
        push(self._requests.close)
        self._generation = Generation(
            front,
            models,
            Admission(LatestLoads(), max_requests=2**31),
            FrontendMetrics(),
            GenerateOptions(strict_fields=True, request_timeout_s=_NO_DEADLINE_S),
        )

    async def close(self) -> None:
        """End all requests and the engine. Idempotent."""
        self._is_closed = True
        self._generation = None
        await self._starting.close()
        await self._stack.aclose()

    @property
    def model(self) -> Model:
        if self._model is None or self._generation is None:
            problem = "is closed" if self._is_closed else "is not started"
            raise Unavailable(f"the engine of {self._requested!r} {problem}", reason="not_running")
        return self._model

    @property
    def max_concurrent(self) -> int:
        """Requests that the engine gets at the same time; others wait here."""
        return _SEQUENCES_PER_SLOT * self.model.capacity.max_num_seqs

    # --- requests

    def completion(self, prompt: Prompt, params: Params, lora: str | None, stream: bool) -> HttpRequest:
        body = completion_body(lora or self.model.name, prompt, params, stream)
        return self._request(_COMPLETIONS, body)

    def chat(
        self,
        messages: Sequence[Message],
        params: Params,
        options: ChatOptions,
        lora: str | None,
        stream: bool,
    ) -> HttpRequest:
        body = chat_body(lora or self.model.name, messages, params, options, stream)
        return self._request(_CHAT, body)

    def _request(self, path: str, body: bytes) -> HttpRequest:
        request = HttpRequest("POST", path, {}, body)
        request.id = new_id(self._rng)
        return request

    async def answer_all(
        self, requests: Sequence[Callable[[], HttpRequest]], on_answer: Callable[[], None]
    ) -> list[RequestOutput]:
        """Answer all requests, in order. The first error cancels the others; a note has its number."""
        results: dict[int, RequestOutput] = {}
        remaining = iter(enumerate(requests))
        has_failed = False

        async def answer_remaining() -> None:
            nonlocal has_failed
            for number, build in remaining:
                try:
                    async with self._running(build()) as (answer, run):
                        await self._join(run)
                        results[number] = answer.take()
                except KvoltError as error:
                    if has_failed:
                        return  # the same mistake, or the same end of the engine: one error says it
                    has_failed = True
                    error.add_note(f"in prompt {number} of {len(requests)}")
                    raise
                on_answer()

        async with Scope("batch") as scope:
            for number in range(min(len(requests), self.max_concurrent)):
                scope.start(answer_remaining(), str(number))
        return [results[number] for number in range(len(requests))]

    async def stream(self, request: HttpRequest) -> AsyncGenerator[RequestOutput, None]:
        """Parts of one answer as they arrive. Closing the iterator cancels the request at the engine."""
        async with self._running(request) as (answer, run):
            has_ended = False
            while not has_ended:
                await answer.wait_news()
                has_ended = run.done()
                part = answer.take()
                if part.outputs:
                    yield part
            await self._join(run)

    async def _join(self, run: asyncio.Task[None]) -> None:
        """Wait for a request; raises its error, or Unavailable if the server was closed."""
        await asyncio.wait([run])
        if run.cancelled():
            _ = self.model
        run.result()

    @asynccontextmanager
    async def _running(self, request: HttpRequest) -> AsyncIterator[tuple[ResultAnswer, asyncio.Task[None]]]:
        """Prepare and start a request. Leaving the block cancels it at the engine."""
        model, generation = self.model, self._generation
        assert generation is not None, model
        is_chat = request.path == _CHAT
        prepare = generation.prepare_chat if is_chat else generation.prepare_completion
        with generation.new_record(request.path, request) as record:
            context = await prepare(request, record)
            requests, spec = await generation.build(context)
            prompt = context.prompt_text if is_chat else next(iter(context.texts or ()), None)
            answer = ResultAnswer(spec, prompt, generation.new_call_id)
            # Not a Scope: its failure would cancel the task that iterates a stream, wherever that is.
            run = self._requests.start(generation.run(context, answer, requests), spec.request_id)
            run.add_done_callback(lambda _: answer.wake())
            try:
                yield answer, run
            finally:
                run.cancel()
                await asyncio.wait([run])
                record_usage(record, answer)
                answer.close()

    async def embed(self, prompts: Sequence[Prompt], on_answer: Callable[[], None]) -> list[list[float]]:
        model, worker = self.model, self._worker
        assert worker is not None
        engine = self._engine
        if "Embed" not in worker.features or not isinstance(engine, Embed):
            name = worker.info.engine if worker.info is not None else "?"
            raise Unsupported(
                f"the engine {name!r} does not compute embeddings; use the native engine, with "
                "LLM(model, engine='native')",
                feature="embeddings",
            )
        vectors = []
        for prompt in prompts:
            checked = checked_prompt(prompt)
            token_ids = (
                (await model.processor.encode([checked], "prompt", True))[0]
                if isinstance(checked, str)
                else checked
            )
            vectors += await engine.embed([token_ids])
            on_answer()
        return vectors
