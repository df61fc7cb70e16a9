"""VllmEngine: adapter for vLLM.

Sends requests to vLLM's engine core and converts its step outputs, one step at a time, without a task or queue per
request and without text. `requests` and `outputs` convert formats, `launch` starts vLLM, `kv_events` forwards its KV
events.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from kvolt.core.errors import (
    ConfigError,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    Unavailable,
    Unsupported,
)
from kvolt.core.ids import RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import COMMON_SAMPLING_FIELDS, EngineSpec
from kvolt.engines.external.answers import Choice
from kvolt.engines.external.base import ExternalEngine
from kvolt.engines.external.metrics import engine_metrics
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.extras import EMBEDS, check_embeds, check_extra, read_rows, refuse_handoff
from kvolt.engines.vllm.hold_renewals import HoldRenewals
from kvolt.engines.vllm.kv_events import KvEventForwarder
from kvolt.engines.vllm.launch import Launched, launch, socket_folder
from kvolt.engines.vllm.loras import Adapters
from kvolt.engines.vllm.outputs import choice_output, load_of
from kvolt.engines.vllm.plugins.kv_holds import reads_of
from kvolt.engines.vllm.plugins.tier_stats import VllmTierMetrics
from kvolt.engines.vllm.prefills import Prefills, transfer_params
from kvolt.engines.vllm.request_stats import RequestStats
from kvolt.engines.vllm.requests import check_supported, prompt_input, sampling_params
from kvolt.engines.vllm.symbols import refusals
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.host.environment import environment

log = logging.getLogger(__name__)

_STOP_S = 10.0
"""Timeout of vLLM's shutdown."""
_LEVELS = (1, 2)
_WITHOUT_WEIGHTS = 2
"""Level at which weights are discarded and must be reloaded."""


class SleepState:
    """Sleep mode: needs a GPU and `enable_sleep_mode`; without them vLLM only warns and frees nothing."""

    def __init__(self) -> None:
        self._level: int | None = None
        """Level of sleep, at least as deep as the real one; None while awake."""
        self._is_confirmed = False
        """Whether vLLM has confirmed the level."""

    @property
    def is_asleep(self) -> bool:
        return self._level is not None

    async def sleep(self, core: Any, level: int, num_running: int) -> None:
        if level not in _LEVELS:
            raise InvalidRequest(f"vLLM sleeps at level 1 or 2, not {level}", param="level")
        if self._level is not None and level > self._level:  # vLLM would ignore it
            raise InvalidRequest(
                f"vLLM sleeps at level {self._level}: for level {level} it must be woken first", param="level"
            )
        if self._level is not None and self._is_confirmed:
            return  # asleep at this level or deeper
        if num_running:
            raise Unavailable("vLLM cannot sleep while requests run", reason="busy")
        # From here on requests are refused, since vLLM would abort them. If this call is interrupted, vLLM counts as
        # asleep until it is woken, which is harmless if it is awake.
        self._level, self._is_confirmed = self._level or level, False
        try:
            await core.sleep_async(level)
        except Exception:  # other workers may be asleep, and nothing is scheduled
            if not await core.is_sleeping_async():
                self._level = None
            raise
        self._is_confirmed = True

    async def wake(self, core: Any) -> None:
        if self._level == _WITHOUT_WEIGHTS:
            await core.wake_up_async(["weights"])
            await core.collective_rpc_async("reload_weights")
        await core.wake_up_async()
        self._level, self._is_confirmed = None, False


def check_sleep_supported(features: tuple[str, ...]) -> None:
    if "Sleep" not in features:
        raise Unsupported("vLLM was started without enable_sleep_mode (GPUs only)", feature="sleep")


class VllmEngine(ExternalEngine[Launched]):
    """See the module. For one event loop. Call `close` also after a failure."""

    name, title = "vllm", "vLLM"
    sampling_fields = COMMON_SAMPLING_FIELDS | {"logit_bias", "allowed_token_ids", "prompt_logprobs"}

    def __init__(
        self,
        spec: EngineSpec,
        arguments: VllmArguments,
        *,
        launcher: Callable[..., Launched] = launch,
    ) -> None:
        """`launcher`: replaced in tests."""
        super().__init__()
        self._spec = spec
        self._arguments = arguments
        self._launcher = launcher
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._adapters = Adapters(self._is_open)
        self._request_stats = RequestStats()
        self._tier_metrics = VllmTierMetrics()
        self._kv = KvEventForwarder(self._step_queue, self._adapters.name_of)
        self._commands: asyncio.Queue[Callable[[], Awaitable[Any]]] = asyncio.Queue()
        """Calls to the engine core, in order."""
        self._sleep_state = SleepState()
        self._renewals = HoldRenewals()
        self._prefills = Prefills(
            self._core_request, self._post, lambda: self._core, self._request_stats.remove
        )

    # --- life cycle

    async def _launch(self) -> Launched:
        self._sockets = socket_folder()
        folder = Path(self._sockets.name)
        return await self._load(
            lambda: self._launcher(self._spec, self._arguments, folder, SystemClock()),
            lambda launched: launched.llm.shutdown(_STOP_S),
        )

    async def _start_tasks(self, running: Launched) -> None:
        core = running.llm.engine_core
        self._request_stats.logger = running.llm.logger_manager
        running.tasks = tuple(await core.get_supported_tasks_async())
        self._kv.start(running.info, running.events, self._task_group, bool(self._arguments.tiers.disk))
        self._start_task(self._read, "outputs")
        self._start_task(self._send, "commands")
        self._start_task(self._renewals.run, "renewals")
        for name, path in self._arguments.loras.items():
            try:
                await self.load_lora(name, path)
            except InvalidRequest as error:
                raise ConfigError(
                    f"adapter {name}: {error.message}",
                    key="args.loras",
                    remedy="name a folder as PEFT writes it",
                ) from error

    async def _shut_down(self) -> None:
        if self._running is not None:
            self._running.llm = None
            gc.collect()  # part of a reference cycle; its __del__ fails at interpreter exit
        self._kv.close()
        self._renewals.close()
        if self._sockets is not None:
            self._sockets.cleanup()

    def _on_end(self) -> None:
        self._prefills.fail_all(self._death_error())

    # --- steps

    async def _read(self) -> None:
        running = self._launched
        core, num_blocks = running.llm.engine_core, running.info.capacity.kv_total_blocks
        while True:
            outputs = await core.get_output_async()
            self._request_stats.on_step(outputs)
            stats, rank = outputs.scheduler_stats, outputs.engine_index
            if stats is not None:
                for read in reads_of(stats.kv_connector_stats):
                    self._answers.add_transfer(read.engine_id, read.num_bytes, read.took_s, "nixl")
            for output in outputs.outputs:
                self._on_core_output(output)
            load = None
            if stats is not None:
                self._tier_metrics.update(rank, stats.kv_connector_stats, running.info.block_size)
                load = load_of(stats, num_blocks, rank)
                if not (self._kv.is_load_changed(load) or outputs.outputs):
                    load = None
            self._step_queue.put(self._answers.take_step(load))
            await self._step_queue.wait_for_space()  # backpressure: outputs wait in vLLM's queue

    def _on_core_output(self, output: Any) -> None:
        if self._prefills.on_output(output):
            return
        if self._renewals:
            self._renewals.stop(output.request_id)
        choice = self._answers.find(output.request_id)
        if choice is None:
            return  # aborted
        try:
            self._answers.add_output(choice, choice_output(output, choice))
        except EngineFailed as error:
            self._fail_request(choice.request.request_id, error)

    async def _send(self) -> None:
        while True:
            command = await self._commands.get()
            await command()

    # --- requests

    def _check_supported(self, request: Request, running: Launched) -> None:
        if self._sleep_state.is_asleep:
            raise Unavailable("the engine is asleep", reason="asleep")
        check_supported(request)
        check_extra(request, running.processors)
        check_embeds(request, running.takes_embeds)
        self._adapters.find(request.lora)

    @property
    def _num_waiting(self) -> int:
        return super()._num_waiting + self._prefills.num_open

    def _submit_choices(self, request: Request, choices: list[Choice]) -> None:
        self._adapters.add_user(request.request_id, request.lora)
        if EMBEDS in request.extra:
            adapter = self._adapters.find(request.lora)  # may be unloaded while the vectors are read
            self._task_group.start(self._submit_embedded(choices, adapter), "prompt embeds")
            return
        transfer = None if request.handoff is None else transfer_params(request.handoff)
        self._add([self._core_request(choice, transfer) for choice in choices])
        if transfer is not None and self._launched.moves_kv:
            for choice in choices:
                self._renewals.start(choice.engine_id, transfer)

    async def _submit_embedded(self, choices: list[Choice], adapter: Any) -> None:
        """Read the vectors in a thread, since it takes long, then submit."""
        request = choices[0].request
        try:
            rows = await asyncio.to_thread(read_rows, request, self._launched.llm.vllm_config.model_config)
            if any(self._answers.find(each.engine_id) is not each for each in choices):
                return  # aborted
            core_requests = [
                self._core_request(choice, None, rows=rows, adapter=adapter) for choice in choices
            ]
        except Exception as error:  # fails this request only; out of memory, for example
            if not isinstance(error, KvoltError):
                log.exception("prompt embeds unreadable: request_id=%s", request.request_id)
                error = EngineFailed(f"reading prompt_embeds failed ({type(error).__name__})", engine="vllm")
            self._answers.fail(request.request_id, error)  # vLLM does not have the request
            self._step_queue.put(self._answers.take_step())
            return
        self._add(core_requests)

    def _add(self, core_requests: list[Any]) -> None:
        for each in core_requests:
            self._post(partial(self._core.add_request_async, each))

    @property
    def _core(self) -> Any:
        self._check_alive()
        return self._launched.llm.engine_core

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
        """Request for the engine core, as vLLM's server creates it. InvalidRequest if vLLM refuses it. `rows`: see
        `prompt_input`. `adapter`: overrides the adapter loaded under the request's name now."""
        request, running = choice.request, self._launched
        params = sampling_params(choice, kv_transfer=transfer, only_prompt=only_prompt)
        try:
            core_request = running.llm.input_processor.process_inputs(
                choice.engine_id,
                prompt_input(request, choice.index, rows),
                params,
                supported_tasks=running.tasks,
                lora_request=adapter or self._adapters.find(request.lora),
                priority=-request.routing.priority,  # in vLLM lower values run first
                data_parallel_rank=request.routing.pinned_dp_rank,
            )
        except refusals() as error:
            raise InvalidRequest(f"vLLM refuses the request: {error}", param="request") from error
        core_request.external_req_id = request.request_id
        self._request_stats.add(core_request)
        return core_request

    def _abort_choices(self, engine_ids: list[str]) -> None:
        self._request_stats.remove(engine_ids)
        for engine_id in engine_ids:
            self._renewals.stop(engine_id)
        self._post(partial(self._core.abort_requests_async, engine_ids))

    def _post(self, command: Callable[[], Awaitable[Any]]) -> None:
        self._commands.put_nowait(command)

    # --- MetricsProvider, KvEvents, Lora, Sleep

    def metrics(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        yield from engine_metrics("vllm:", labels, environment("PROMETHEUS_MULTIPROC_DIR"))
        yield from self._tier_metrics.collect()

    async def clear_kv(self) -> int:
        """Running requests are preempted and recomputed."""
        num_blocks = self._kv.num_on_device
        try:
            is_cleared = await self._core.reset_prefix_cache_async(True, bool(self._arguments.tiers.host))
        except KvoltError:
            raise
        except Exception as error:  # any exception type, for example while blocks are held for handoffs
            raise Unavailable(f"vLLM cannot clear its cache now: {error}", reason="busy") from error
        if not is_cleared:
            raise Unavailable("vLLM cannot clear its cache now", reason="busy")
        self._kv.clear()
        return num_blocks

    async def load_lora(self, name: str, path: str) -> None:
        core = self._core
        if self._launched.llm.vllm_config.lora_config is None:
            raise Unsupported("vLLM was started without enable_lora", feature="lora")
        await self._adapters.load(core, name, path)

    async def unload_lora(self, name: str) -> None:
        await self._adapters.unload(self._core, name)

    def loras(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    async def sleep(self, level: int) -> None:
        core = self._core
        check_sleep_supported(self._launched.info.features)
        await self._sleep_state.sleep(core, level, self._answers.num_choices + self._prefills.num_open)
        self._kv.clear()

    async def wake(self) -> None:
        core = self._core
        check_sleep_supported(self._launched.info.features)
        await self._sleep_state.wake(core)

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        self._check(request)
        if not self._launched.moves_kv:
            raise Unsupported("vLLM was started without a connector that transfers KV", feature="prefill")
        refuse_handoff(request)
        self._adapters.add_user(request.request_id, request.lora)
        return await self._prefills.compute(request, self._arguments.hold_s)

    async def release_prefill(self, request_id: RequestId) -> None:
        self._prefills.release(request_id)
