"""TrtllmEngine: TensorRT-LLM's LLM API behind the contract.

Owns its life as the worker sees it, and steps: what all sequences have said by now is told in one go. How sequences
come to be there and end is in `sequences`, how it is started in `launch`, what is asked of it in `polling`.
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
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.answers import Choice, News
from kvolt.engines.external.base import ExternalEngine
from kvolt.engines.trtllm.arguments import TrtllmArguments
from kvolt.engines.trtllm.launch import Launched, launch
from kvolt.engines.trtllm.prefills import states_of
from kvolt.engines.trtllm.requests import check_resumable, check_supported
from kvolt.engines.trtllm.running import Running
from kvolt.engines.wakeup import Wakeup
from kvolt.runtime.clock import SystemClock

_LONGEST_POLL_S = 1.0
"""While nothing runs."""


class TrtllmEngine(ExternalEngine[Running]):
    """See the module. For one loop. `close` it, also after it died."""

    name, title = "trtllm", "TensorRT-LLM"

    def __init__(
        self,
        spec: EngineSpec,
        arguments: TrtllmArguments,
        *,
        launcher: Callable[..., Launched] = launch,
    ) -> None:
        """`launcher`: tests have others."""
        super().__init__()
        self._spec = spec
        self._arguments = arguments
        self._launcher = launcher
        self._bell = Wakeup()
        self._has_ended_one = False
        """Whether an answer ended since TensorRT-LLM was asked for its events."""
        self._changes: tuple[KvChange, ...] = ()
        """What is to be told with the next step."""
        self._told = WorkerLoad()

    # --- life

    async def _launch(self) -> Running:
        launched = await self._load(
            lambda: self._launcher(self._spec, self._arguments, SystemClock()),
            lambda launched: launched.llm.shutdown(),
        )
        return Running.of(launched, self._arguments, self._crew, self._on_news, self._on_failure)

    async def _begin(self, running: Running) -> None:
        self._changes = await running.warm_up(self._arguments.poll_s)
        for name, path in self._arguments.loras.items():
            await self.load_lora(name, path)
        self._go_on(partial(self._pump, running), "steps")

    def _on_end(self) -> None:
        if self._running is not None:
            self._running.prefills.close()
            self._running.sequences.clear()

    # --- steps

    async def _pump(self, running: Running) -> None:
        """Tell what there is, until nothing has come for so long that it is taken for dead."""
        loop, poll_s, stall_s = asyncio.get_running_loop(), self._arguments.poll_s, self._arguments.stall_s
        wait_s, was_busy = poll_s, False
        asked_at, heard, heard_at = loop.time(), 0, loop.time()
        while True:
            has_rung = await self._bell.wait(wait_s)
            self._bell.silence()
            await asyncio.sleep(0)  # what came together is told together
            now = loop.time()
            changes, self._changes = self._changes, ()
            if self._has_ended_one or now - asked_at >= poll_s:
                self._has_ended_one = False
                changes += await running.poll.ask()
                asked_at = loop.time()
            if heard != running.num_heard or not was_busy:
                heard, heard_at = running.num_heard, now
            elif now - heard_at > stall_s:
                raise EngineFailed(f"it has said nothing for {stall_s:g} s", engine="trtllm")
            was_busy = running.is_busy
            wait_s = poll_s if was_busy or changes else min(2 * wait_s, _LONGEST_POLL_S)
            self._tell(running.load(), changes, has_rung)
            await self._unread.room()  # while nobody reads, answers gather where they are

    def _tell(self, load: WorkerLoad, changes: tuple[KvChange, ...], has_rung: bool) -> None:
        is_news = has_rung or changes or load != self._told
        self._told = load
        self._unread.put(self._answers.take(load if is_news else None, changes))

    def _on_news(self, choice: Choice, news: News) -> None:
        if self._answers.find(choice.engine_id) is not choice:
            return  # nobody waits for it any more
        self._answers.tell(choice, news)
        self._has_ended_one = self._has_ended_one or news.finish is not None
        self._bell.ring()

    def _on_failure(self, choice: Choice, error: KvoltError) -> None:
        if self._answers.find(choice.engine_id) is choice:
            self._give_up(choice.request.request_id, error)
            self._bell.ring()

    # --- requests

    def _check_own(self, request: Request, running: Running) -> None:
        launched = running.launched
        longest = launched.longest_prompt
        if longest is not None and request.num_given_tokens > longest:
            raise InvalidRequest(
                f"{request.num_given_tokens} tokens are over the {longest} of one of TensorRT-LLM's steps "
                "(llm_args.max_num_tokens, or enable_chunked_prefill)",
                param="token_ids",
            )
        running.adapters.loaded.find(request.lora)
        check_supported(request, has_grammars=launched.has_grammars, seeds=self._arguments.seeds)

    @property
    def _num_waiting(self) -> int:
        return self._known.admission.num_waiting

    def _hand_over(self, request: Request, choices: list[Choice]) -> None:
        states = states_of(request)
        if not states:
            check_resumable(request, self._arguments.seeds)
        for choice in choices:
            self._known.sequences.answer(choice, states[choice.index] if states else None)
        self._bell.ring()

    def _drop(self, engine_ids: list[str]) -> None:
        for name in engine_ids:
            self._known.sequences.drop(name)
        self._bell.ring()

    def _has_begun(self, request_id: RequestId) -> bool:
        """Those that wait here have not. What TensorRT-LLM has may have."""
        names = self._answers.names_of(request_id)
        return not all(self._known.admission.is_waiting(name) for name in names)

    # --- KvEvents, Lora

    async def clear_kv(self) -> int:
        raise Unsupported("TensorRT-LLM's LLM API has no call that clears its cache", feature="clear_kv")

    async def load_lora(self, name: str, path: str) -> None:
        """Whether it fits the model is seen when a request first names it."""
        if not self._known.launched.has_loras:
            raise Unsupported("TensorRT-LLM was started without llm_args.enable_lora", feature="lora")
        self._known.adapters.add(name, path)

    async def unload_lora(self, name: str) -> None:
        running = self._known
        running.adapters.loaded.take(name)
        seeds, translator = running.sequences.seeds_of(name), running.poll.translator
        if seeds and translator is not None:
            self._changes += tuple(translator.forget(seeds))
            self._bell.ring()

    def loras(self) -> tuple[str, ...]:
        return self._known.adapters.loaded.names

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        self._check(request)
        check_resumable(request, self._arguments.seeds)
        if not self._known.launched.moves_kv:
            raise Unsupported(
                "TensorRT-LLM was started without a cache_transceiver_config", feature="prefill"
            )
        try:
            return await self._known.prefills.compute(request)
        except Cancelled:
            self._check_alive()  # else that is why
            raise
        finally:
            self._bell.ring()

    async def release_prefill(self, request_id: RequestId) -> None:
        self._known.prefills.release(request_id)
        self._bell.ring()
