"""VllmEngine: vLLM behind the contract.

Owns vLLM's life as the worker sees it, and the way of a request to its engine core and of a step's outputs back: all
of a step in one go, as the core sends them, without a task or a queue for each request and without text. What is said
in whose words is in `requests` and `outputs`; how it is started, in `launch`; what it tells of its blocks, in
`kv_telling`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from kvolt.core.card import EngineInfo, ModelCard
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
from kvolt.core.request import Handoff, Request
from kvolt.engines.foreign.answers import Answers, Choice
from kvolt.engines.foreign.metrics import engine_metrics
from kvolt.engines.registry import EngineSpec
from kvolt.engines.step_plan import check_request, check_vocabulary
from kvolt.engines.unread_steps import UnreadSteps
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.extras import check_extra
from kvolt.engines.vllm.figures import Figures
from kvolt.engines.vllm.kv_telling import KvTelling
from kvolt.engines.vllm.launch import Launched, launch, socket_folder
from kvolt.engines.vllm.loras import Adapters
from kvolt.engines.vllm.outputs import load_of, news_of
from kvolt.engines.vllm.prefills import Prefills, transfer_params
from kvolt.engines.vllm.prompt_embeds import EMBEDS, check_embeds, read_rows, refuse_handoff
from kvolt.engines.vllm.refusals import refusals
from kvolt.engines.vllm.requests import check_supported, prompt_input, sampling_params
from kvolt.engines.vllm.rest import Rest, check_sleeps
from kvolt.engines.vllm_plugins.tier_figures import VllmTierMetrics
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.environment import environment
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_STOP_S = 10.0
"""For vLLM's processes to end by themselves."""


class VllmEngine:
    """See the module. For one loop. `close` it, also after it died."""

    def __init__(
        self,
        spec: EngineSpec,
        arguments: VllmArguments,
        *,
        launcher: Callable[..., Launched] = launch,
    ) -> None:
        """`launcher`: tests have others."""
        self._spec = spec
        self._arguments = arguments
        self._launcher = launcher
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._running: Launched | None = None
        self._crew = Crew("vllm", self._on_error)
        self._answers = Answers()
        self._adapters = Adapters(self._is_open)
        self._figures = Figures(None)
        self._tier_metrics = VllmTierMetrics()
        self._unread = UnreadSteps()
        self._kv = KvTelling(self._unread, self._adapters.name_of)
        self._commands: asyncio.Queue[Callable[[], Awaitable[Any]]] = asyncio.Queue()
        """What is sent to the core, in order."""
        self._rest = Rest()
        self._prefills = Prefills(self._core_request, self._post, lambda: self._core, self._forget)
        self._loading: asyncio.Task[Launched] | None = None
        self._last = Crew("vllm close", lambda error: None)  # whoever waits for these has their errors
        self._closing: asyncio.Task[None] | None = None

    # --- life

    @property
    def card(self) -> ModelCard:
        return self._known.card

    @property
    def _known(self) -> Launched:
        if self._running is None:
            raise EngineFailed("the vllm engine knows its model once it is started", engine="vllm")
        return self._running

    async def start(self) -> EngineInfo:
        if self._sockets is not None or self._unread.is_over:
            raise EngineFailed("a vllm engine is started once", engine="vllm")
        self._sockets = socket_folder()
        self._loading = self._last.start(self._launch(Path(self._sockets.name)), "launch")
        try:
            running = await asyncio.shield(self._loading)
        except BaseException:
            self._end(None)  # nobody waits any more: what is loaded meanwhile is let go
            raise
        self._running = running
        self._answers.eos_token_ids = frozenset(running.card.eos_token_ids)
        core = running.llm.engine_core
        self._figures = Figures(running.llm.logger_manager)
        running.tasks = tuple(await core.get_supported_tasks_async())
        self._kv.begin(running.info, running.events, self._crew, bool(self._arguments.tiers.disk))
        self._crew.start(self._read(), "outputs")
        self._crew.start(self._send(), "commands")
        for name, path in self._arguments.loras.items():
            try:
                await self.load_lora(name, path)
            except InvalidRequest as error:
                raise ConfigError(
                    f"adapter {name}: {error.message}",
                    key="args.loras",
                    remedy="name a folder as PEFT writes it",
                ) from error
        return running.info

    async def _launch(self, folder: Path) -> Launched:
        try:
            running = await asyncio.to_thread(
                self._launcher, self._spec, self._arguments, folder, SystemClock()
            )
        except KvoltError:
            raise
        except Exception as error:
            raise EngineFailed(f"vLLM did not start: {error}", engine="vllm") from error
        if self._unread.is_over:
            await asyncio.to_thread(running.llm.shutdown)
        return running

    def steps(self) -> AsyncIterator[StepOutput]:
        return self._unread.read()

    async def close(self) -> None:
        if self._closing is None:
            self._end(None)
            self._closing = self._last.start(self._close(), "close")
        await asyncio.shield(self._closing)  # whoever waits may go: the next one waits for the same end

    async def _close(self) -> None:
        if (
            self._loading is not None
        ):  # in a thread, which nobody can stop: what it makes is let go when it is there
            await asyncio.wait([self._loading])
        await self._crew.close()
        if self._running is not None:
            await asyncio.to_thread(self._running.llm.shutdown, _STOP_S)
            self._running.llm = None
            gc.collect()  # it is part of a cycle, and its __del__ fails when the interpreter ends
        self._kv.close()
        if self._sockets is not None:
            self._sockets.cleanup()

    def _on_error(self, error: BaseException) -> None:
        """One of our tasks ended by an error: nothing goes on without it."""
        self._end(EngineFailed(f"vLLM ended: {str(error) or type(error).__name__}", engine="vllm"))

    def _end(self, failure: EngineFailed | None) -> None:
        if not self._unread.is_over:
            self._prefills.end(EngineDied("the engine has ended", engine="vllm"))
            self._answers.clear()
            self._unread.end(failure)

    # --- steps

    async def _read(self) -> None:
        running = self._known
        core, num_blocks = running.llm.engine_core, running.info.capacity.kv_total_blocks
        while True:
            outputs = await core.get_output_async()
            self._figures.step(outputs)
            for output in outputs.outputs:
                self._take(output)
            stats, rank = outputs.scheduler_stats, outputs.engine_index
            load = None
            if stats is not None:
                self._tier_metrics.take(rank, stats.kv_connector_stats, running.info.block_size)
                load = load_of(stats, num_blocks, rank)
                if not (self._kv.is_news(load) or outputs.outputs):
                    load = None
            self._unread.put(self._answers.take(load))
            await self._unread.room()  # where nobody reads, vLLM's own queue fills

    def _take(self, output: Any) -> None:
        if self._prefills.take(output):
            return
        choice = self._answers.find(output.request_id)
        if choice is None:
            return  # nobody waits for it any more
        try:
            self._answers.tell(choice, news_of(output, choice))
        except EngineFailed as error:
            self._abort_in_core(self._answers.fail(choice.request.request_id, error))

    async def _send(self) -> None:
        while True:
            command = await self._commands.get()
            await command()

    # --- requests

    def submit(self, request: Request) -> None:
        self._check(request)
        transfer = None
        if request.handoff is not None:
            transfer = transfer_params(request.handoff)
        choices = self._answers.open(request)
        self._adapters.use(request.request_id, request.lora)
        if EMBEDS in request.extra:
            adapter = self._adapters.find(request.lora)  # one that is unloaded later serves who has it
            self._crew.start(self._submit_embedded(choices, adapter), "prompt embeds")
            return
        try:
            made = [self._core_request(choice, transfer) for choice in choices]
        except BaseException:
            self._answers.close(request.request_id)
            raise
        for each in made:
            self._post(partial(self._core.add_request_async, each))

    async def _submit_embedded(self, choices: list[Choice], adapter: Any) -> None:
        """To read vectors takes its time, which other requests' tokens do not wait for."""
        request = choices[0].request
        try:
            rows = await asyncio.to_thread(read_rows, request, self._known.llm.vllm_config.model_config)
            if any(self._answers.find(each.engine_id) is not each for each in choices):
                return  # nobody waits for it any more
            made = [self._core_request(choice, None, rows=rows, adapter=adapter) for choice in choices]
        except Exception as error:  # of one request, whatever it was: memory that is not there, perhaps
            if not isinstance(error, KvoltError):
                log.exception("vectors of %s could not be read", request.request_id)
                error = EngineFailed(f"vLLM failed on it ({type(error).__name__})", engine="vllm")
            self._answers.fail(request.request_id, error)
            self._unread.put(self._answers.take())
            return
        for each in made:
            self._post(partial(self._core.add_request_async, each))

    @property
    def _core(self) -> Any:
        if self._unread.is_over:
            raise EngineDied("the engine has ended", engine="vllm")
        return self._known.llm.engine_core

    def _check(self, request: Request) -> None:
        if self._unread.is_over:
            raise EngineDied("the engine has ended", engine="vllm")
        if self._rest.is_asleep:
            raise Unavailable("the engine is asleep", reason="asleep")
        running = self._known
        check_request(request, running.limits, running.info.capacity.kv_total_blocks)
        check_vocabulary(request, running.vocab_size)
        check_supported(request)
        check_extra(request, running.processors)
        check_embeds(request, running.takes_embeds)
        self._adapters.find(request.lora)
        max_waiting = self._arguments.max_waiting
        num_open = self._answers.num_choices + self._prefills.num_open
        num_ranks = len(running.info.dp_ranks)
        if num_open - running.info.capacity.max_num_seqs * num_ranks >= max_waiting:
            raise Overloaded("the engine's queue is full", queue="engine", limit=max_waiting)

    def _is_open(self, request_id: RequestId) -> bool:
        return request_id in self._answers or self._prefills.is_computing(request_id)

    def _core_request(
        self,
        choice: Choice,
        transfer: dict[str, Any] | None,
        only_prompt: bool = False,
        rows: Any = None,
        adapter: Any = None,
    ) -> Any:
        """As vLLM's own server makes it. InvalidRequest for what vLLM refuses. `rows`: see `prompt_input`. `adapter`:
        the one that it found when it came, where that was a while ago."""
        request, running = choice.request, self._known
        params = sampling_params(choice, kv_transfer=transfer, only_prompt=only_prompt)
        try:
            made = running.llm.input_processor.process_inputs(
                choice.engine_id,
                prompt_input(request, choice.index, rows),
                params,
                supported_tasks=running.tasks,
                lora_request=adapter or self._adapters.find(request.lora),
                priority=-request.routing.priority,  # there less is sooner
                data_parallel_rank=request.routing.pinned_dp_rank,
            )
        except refusals() as error:
            raise InvalidRequest(f"vLLM refuses it: {error}", param="request") from error
        made.external_req_id = request.request_id
        self._figures.begin(made)
        return made

    def abort(self, request_id: RequestId) -> None:
        self._abort_in_core(self._answers.close(request_id))
        self._unread.forget(request_id)

    def _abort_in_core(self, engine_ids: list[str]) -> None:
        self._forget(engine_ids)
        if engine_ids and not self._unread.is_over:
            self._post(partial(self._core.abort_requests_async, engine_ids))

    def _forget(self, engine_ids: list[str]) -> None:
        """Nothing more is heard of these."""
        self._figures.forget(engine_ids)

    def _post(self, command: Callable[[], Awaitable[Any]]) -> None:
        self._commands.put_nowait(command)

    async def withdraw(self, request_id: RequestId) -> bool:
        """Whether it runs only vLLM knows: one that has said nothing is taken back."""
        if request_id not in self._answers or self._answers.has_begun(request_id):
            return False
        self.abort(request_id)
        return True

    # --- Measured, KvEvents, Lora, Sleep

    def metrics(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        yield from engine_metrics("vllm:", labels, environment("PROMETHEUS_MULTIPROC_DIR"))
        yield from self._tier_metrics.collect()

    async def clear_kv(self) -> int:
        """Those that run are preempted, and computed again."""
        num_blocks = self._kv.num_on_device
        try:
            is_cleared = await self._core.reset_prefix_cache_async(True, bool(self._arguments.tiers.host))
        except KvoltError:
            raise
        except (
            Exception
        ) as error:  # it says so by whatever its engine raised, where blocks are kept for others
            raise Unavailable(f"vLLM cannot clear its cache now: {error}", reason="busy") from error
        if not is_cleared:
            raise Unavailable("vLLM cannot clear its cache now", reason="busy")
        self._kv.clear()
        return num_blocks

    async def load_lora(self, name: str, path: str) -> None:
        core = self._core
        if self._known.llm.vllm_config.lora_config is None:
            raise Unsupported("vLLM was started without enable_lora", feature="lora")
        await self._adapters.load(core, name, path)

    async def unload_lora(self, name: str) -> None:
        await self._adapters.unload(self._core, name)

    def loras(self) -> tuple[str, ...]:
        return self._adapters.names

    async def sleep(self, level: int) -> None:
        core = self._core
        check_sleeps(self._known.info.features)
        await self._rest.begin(core, level, self._answers.num_choices + self._prefills.num_open)
        self._kv.clear()

    async def wake(self) -> None:
        core = self._core
        check_sleeps(self._known.info.features)
        await self._rest.end(core)

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        self._check(request)
        if not self._known.moves_kv:
            raise Unsupported("vLLM was started without a connector that moves KV", feature="prefill")
        refuse_handoff(request)
        self._adapters.use(request.request_id, request.lora)
        return await self._prefills.compute(request, self._arguments.hold_s)

    async def release_prefill(self, request_id: RequestId) -> None:
        self._prefills.release(request_id)
