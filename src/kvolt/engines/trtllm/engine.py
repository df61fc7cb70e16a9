"""TrtllmEngine: adapter for TensorRT-LLM's LLM API.

Gathers the output of all sequences into steps. `sequences` manages the requests, `launch` starts TensorRT-LLM,
`running` polls KV events and statistics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from kvolt.core.errors import Cancelled, EngineFailed, InvalidRequest, KvoltError, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import KvChange
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import COMMON_SAMPLING_FIELDS, EngineSpec
from kvolt.engines.external.answers import Choice, ChoiceOutput
from kvolt.engines.external.base import ExternalEngine
from kvolt.engines.trtllm.arguments import TrtllmArguments
from kvolt.engines.trtllm.launch import Launched, launch
from kvolt.engines.trtllm.prefills import context_states
from kvolt.engines.trtllm.requests import check_resumable, check_supported
from kvolt.engines.trtllm.running import Running
from kvolt.engines.wakeup import Wakeup
from kvolt.runtime.clock import SystemClock

_MAX_POLL_S = 1.0
"""Poll interval while idle."""


class TrtllmEngine(ExternalEngine[Running]):
    """See the module. For one event loop. Call `close` also after a failure."""

    name, title = "trtllm", "TensorRT-LLM"
    sampling_fields = COMMON_SAMPLING_FIELDS
    """It returns the most likely prompt tokens, but not the logprobs of the prompt itself."""

    def __init__(
        self,
        spec: EngineSpec,
        arguments: TrtllmArguments,
        *,
        launcher: Callable[..., Launched] = launch,
    ) -> None:
        """`launcher`: replaced in tests."""
        super().__init__()
        self._spec = spec
        self._arguments = arguments
        self._launcher = launcher
        self._wakeup = Wakeup()
        self._has_finished_choice = False
        """Whether a choice has finished since the last poll of events."""
        self._changes: tuple[KvChange, ...] = ()
        """KV changes for the next step."""
        self._last_load = WorkerLoad()

    # --- life cycle

    async def _launch(self) -> Running:
        launched = await self._load(
            lambda: self._launcher(self._spec, self._arguments, SystemClock()),
            lambda launched: launched.llm.shutdown(),
        )
        return Running.of(launched, self._arguments, self._task_group, self._on_output, self._on_failure)

    async def _start_tasks(self, running: Running) -> None:
        self._changes = await running.warm_up(self._arguments.poll_s)
        for name, path in self._arguments.loras.items():
            await self.load_lora(name, path)
        self._start_task(partial(self._emit_steps, running), "steps")

    def _on_end(self) -> None:
        if self._running is not None:
            self._running.prefills.close()
            self._running.sequences.clear()

    # --- steps

    async def _emit_steps(self, running: Running) -> None:
        """Emit steps. EngineFailed if running requests have no output for `stall_s`."""
        loop, poll_s, stall_s = asyncio.get_running_loop(), self._arguments.poll_s, self._arguments.stall_s
        wait_s, was_busy = poll_s, False
        polled_at, num_outputs, output_at = loop.time(), 0, loop.time()
        while True:
            is_woken = await self._wakeup.wait(wait_s)
            self._wakeup.clear()
            await asyncio.sleep(0)  # gather outputs of one step
            now = loop.time()
            changes, self._changes = self._changes, ()
            if self._has_finished_choice or now - polled_at >= poll_s:
                self._has_finished_choice = False
                changes += await running.poll.read()
                polled_at = loop.time()
            if num_outputs != running.num_outputs or not was_busy:
                num_outputs, output_at = running.num_outputs, now
            elif now - output_at > stall_s:
                raise EngineFailed(f"no output for {stall_s:g} s", engine="trtllm")
            was_busy = running.is_busy
            wait_s = poll_s if was_busy or changes else min(2 * wait_s, _MAX_POLL_S)
            self._emit(running.load(), changes, is_woken)
            await self._step_queue.wait_for_space()  # backpressure: outputs wait in TensorRT-LLM

    def _emit(self, load: WorkerLoad, changes: tuple[KvChange, ...], is_woken: bool) -> None:
        has_changed = is_woken or changes or load != self._last_load
        self._last_load = load
        self._step_queue.put(self._answers.take_step(load if has_changed else None, changes))

    def _on_output(self, choice: Choice, output: ChoiceOutput) -> None:
        if self._answers.find(choice.engine_id) is not choice:
            return  # aborted
        self._answers.add_output(choice, output)
        self._has_finished_choice = self._has_finished_choice or output.finish is not None
        self._wakeup.set()

    def _on_failure(self, choice: Choice, error: KvoltError) -> None:
        if self._answers.find(choice.engine_id) is choice:
            self._fail_request(choice.request.request_id, error)
            self._wakeup.set()

    # --- requests

    def _check_supported(self, request: Request, running: Running) -> None:
        launched = running.launched
        longest = launched.longest_prompt
        if longest is not None and request.num_context_tokens > longest:
            raise InvalidRequest(
                f"{request.num_context_tokens} tokens exceed the maximum of {longest} per step "
                "(llm_args.max_num_tokens, or enable_chunked_prefill)",
                param="token_ids",
            )
        running.adapters.find(request.lora)
        check_supported(request, has_grammars=launched.has_grammars, seeds=self._arguments.seeds)

    @property
    def _num_waiting(self) -> int:
        return self._launched.admission.num_waiting

    def _submit_choices(self, request: Request, choices: list[Choice]) -> None:
        states = context_states(request)
        if not states:
            check_resumable(request, self._arguments.seeds)
        for choice in choices:
            self._launched.sequences.answer(choice, states[choice.index] if states else None)
        self._wakeup.set()

    def _abort_choices(self, engine_ids: list[str]) -> None:
        for name in engine_ids:
            self._launched.sequences.drop(name)
        self._wakeup.set()

    def _has_started(self, request_id: RequestId) -> bool:
        """Sequences in the local queue have not started; others may have."""
        names = self._answers.engine_ids_of(request_id)
        return not all(self._launched.admission.is_waiting(name) for name in names)

    # --- KvEvents, Lora

    async def clear_kv(self) -> int:
        raise Unsupported("TensorRT-LLM's LLM API cannot clear its cache", feature="clear_kv")

    async def load_lora(self, name: str, path: str) -> None:
        """TensorRT-LLM loads it, and detects errors, at the first request that uses it."""
        if not self._launched.launched.has_loras:
            raise Unsupported("TensorRT-LLM was started without llm_args.enable_lora", feature="lora")
        self._launched.adapters.add(name, path)

    async def unload_lora(self, name: str) -> None:
        running = self._launched
        running.adapters.remove(name)
        seeds, translator = running.sequences.seeds_of(name), running.poll.translator
        if seeds and translator is not None:
            self._changes += tuple(translator.drop_seeds(seeds))
            self._wakeup.set()

    def loras(self) -> tuple[str, ...]:
        return tuple(self._launched.adapters)

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        self._check(request)
        check_resumable(request, self._arguments.seeds)
        if not self._launched.launched.moves_kv:
            raise Unsupported(
                "TensorRT-LLM was started without a cache_transceiver_config", feature="prefill"
            )
        try:
            return await self._launched.prefills.compute(request)
        except Cancelled:
            self._check_alive()  # raises if the engine has ended
            raise
        finally:
            self._wakeup.set()

    async def release_prefill(self, request_id: RequestId) -> None:
        self._launched.prefills.release(request_id)
        self._wakeup.set()
