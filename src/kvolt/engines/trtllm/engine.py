"""TrtllmEngine: TensorRT-LLM's LLM API behind the contract.

Owns its life as the worker sees it, and steps: what all sequences have said by now is told in one go. How sequences
come to be there and end is in `sequences`, how it is started in `launch`, what is asked of it in `polling`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.errors import (
    Cancelled,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    Overloaded,
    Unsupported,
)
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import KvChange
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request
from kvolt.engines.bell import Bell
from kvolt.engines.foreign.answers import Answers, Choice, News
from kvolt.engines.registry import EngineSpec
from kvolt.engines.step_plan import check_request, check_vocabulary
from kvolt.engines.trtllm.arguments import TrtllmArguments
from kvolt.engines.trtllm.launch import Launched, launch
from kvolt.engines.trtllm.prefills import states_of
from kvolt.engines.trtllm.requests import check_resumable, check_supported
from kvolt.engines.trtllm.running import Running
from kvolt.engines.unread_steps import UnreadSteps
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_STOP_S = 30.0
"""For TensorRT-LLM's processes to end by themselves."""
_LONGEST_POLL_S = 1.0
"""While nothing runs."""


class TrtllmEngine:
    """See the module. For one loop. `close` it, also after it died."""

    def __init__(
        self,
        spec: EngineSpec,
        arguments: TrtllmArguments,
        *,
        launcher: Callable[..., Launched] = launch,
    ) -> None:
        """`launcher`: tests have others."""
        self._spec = spec
        self._arguments = arguments
        self._launcher = launcher
        self._loading: asyncio.Task[Launched | KvoltError] | None = None
        self._launched: Launched | None = None
        self._running: Running | None = None
        self._crew = Crew("trtllm", self._on_error)
        self._answers = Answers()
        self._names: dict[RequestId, tuple[str, ...]] = {}
        """Of each request's choices."""
        self._bell = Bell()
        self._steps = UnreadSteps()
        self._has_ended_one = False
        """Whether an answer ended since TensorRT-LLM was asked for its events."""
        self._changes: tuple[KvChange, ...] = ()
        """What is to be told with the next step."""
        self._told = WorkerLoad()
        self._failure: EngineFailed | None = None
        self._closed: asyncio.Event | None = None

    # --- life

    @property
    def card(self) -> ModelCard:
        return self._known.launched.card

    @property
    def _known(self) -> Running:
        if self._running is None:
            raise EngineFailed("the trtllm engine knows its model once it is started", engine="trtllm")
        return self._running

    async def start(self) -> EngineInfo:
        if self._loading is not None or self._steps.is_over:
            raise EngineFailed("a trtllm engine is started once", engine="trtllm")
        self._loading = self._crew.start(self._launch(), "launch")
        await asyncio.wait([self._loading])
        if self._steps.is_over:
            raise self._failure or EngineDied("the engine has ended", engine="trtllm")
        launched = self._loading.result()
        if isinstance(launched, KvoltError):
            raise launched
        self._answers.eos_token_ids = frozenset(launched.card.eos_token_ids)
        running = Running.of(launched, self._arguments, self._crew, self._on_news, self._on_failure)
        self._changes = await running.warm_up(self._arguments.poll_s)
        if self._steps.is_over:
            raise EngineDied("the engine has ended", engine="trtllm")
        self._running = running
        for name, path in self._arguments.loras.items():
            await self.load_lora(name, path)
        self._crew.start(self._pump(running), "steps")
        return launched.info

    async def _launch(self) -> Launched | KvoltError:
        try:
            self._launched = await asyncio.to_thread(
                self._launcher, self._spec, self._arguments, SystemClock()
            )
        except KvoltError as error:
            return error
        except Exception as error:
            return EngineFailed(f"TensorRT-LLM did not start: {error}", engine="trtllm")
        return self._launched

    def steps(self) -> AsyncIterator[StepOutput]:
        return self._steps.read()

    async def close(self) -> None:
        if self._closed is not None:
            await self._closed.wait()
            return
        self._closed = asyncio.Event()
        self._end(None)
        try:
            if self._loading is not None and not self._loading.done():
                await asyncio.wait([self._loading])  # a thread cannot be stopped
            await self._crew.close()
            if self._launched is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_S):
                        await asyncio.to_thread(self._launched.llm.shutdown)
        finally:
            self._closed.set()

    def _on_error(self, error: BaseException) -> None:
        """One of our tasks ended by an error: nothing goes on without it."""
        log.error("TensorRT-LLM failed", exc_info=error)
        self._end(EngineFailed(f"TensorRT-LLM ended: {error or type(error).__name__}", engine="trtllm"))

    def _end(self, failure: EngineFailed | None) -> None:
        if self._steps.is_over:
            return
        self._failure = failure
        self._steps.end(failure)
        self._answers.clear()
        self._names.clear()
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
            await self._steps.room()  # while nobody reads, answers gather where they are

    def _tell(self, load: WorkerLoad, changes: tuple[KvChange, ...], has_rung: bool) -> None:
        is_news = has_rung or changes or load != self._told
        self._told = load
        self._steps.put(self._answers.take(load if is_news else None, changes))

    def _on_news(self, choice: Choice, news: News) -> None:
        if self._answers.find(choice.engine_id) is not choice:
            return  # nobody waits for it any more
        self._answers.tell(choice, news)
        if news.finish is not None:
            self._has_ended_one = True
            if choice.request.request_id not in self._answers:
                self._names.pop(choice.request.request_id, None)
        self._bell.ring()

    def _on_failure(self, choice: Choice, error: KvoltError) -> None:
        request_id = choice.request.request_id
        if self._answers.find(choice.engine_id) is not choice:
            return
        self._names.pop(request_id, None)
        for name in self._answers.fail(request_id, error):
            if name != choice.engine_id:
                self._known.sequences.drop(name)
        self._bell.ring()

    # --- requests

    def submit(self, request: Request) -> None:
        self._check(request)
        states = states_of(request)
        if not states:
            check_resumable(request, self._arguments.seeds)
        choices = self._answers.open(request)
        self._names[request.request_id] = tuple(each.engine_id for each in choices)
        for choice in choices:
            self._known.sequences.answer(choice, states[choice.index] if states else None)
        self._bell.ring()

    def _check(self, request: Request) -> None:
        if self._steps.is_over:
            raise EngineDied("the engine has ended", engine="trtllm")
        running = self._known
        launched = running.launched
        check_request(request, launched.limits, launched.num_blocks)
        if launched.vocab_size is not None:
            check_vocabulary(request, launched.vocab_size)
        longest = launched.longest_prompt
        if longest is not None and request.num_given_tokens > longest:
            raise InvalidRequest(
                f"{request.num_given_tokens} tokens are over the {longest} of one of TensorRT-LLM's steps "
                "(llm_args.max_num_tokens, or enable_chunked_prefill)",
                param="token_ids",
            )
        running.adapters.loaded.find(request.lora)
        check_supported(request, has_grammars=launched.has_grammars, seeds=self._arguments.seeds)
        max_waiting = self._arguments.max_waiting
        if running.admission.num_waiting >= max_waiting:
            raise Overloaded("the engine's queue is full", queue="engine", limit=max_waiting)

    def abort(self, request_id: RequestId) -> None:
        self._names.pop(request_id, None)
        for name in self._answers.close(request_id):
            self._known.sequences.drop(name)
        self._steps.forget(request_id)
        self._bell.ring()

    async def withdraw(self, request_id: RequestId) -> bool:
        """Those that wait here. What TensorRT-LLM has may have begun."""
        names = self._names.get(request_id, ())
        if not names or not all(self._known.admission.is_waiting(name) for name in names):
            return False
        self.abort(request_id)
        return True

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
            if self._steps.is_over:
                raise EngineDied("the engine has ended", engine="trtllm") from None
            raise
        finally:
            self._bell.ring()

    async def release_prefill(self, request_id: RequestId) -> None:
        self._known.prefills.release(request_id)
        self._bell.ring()
