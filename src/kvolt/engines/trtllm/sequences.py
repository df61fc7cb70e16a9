"""Sequences: the requests that TensorRT-LLM has, one for each choice or prompt, from their turn to their end.

Owns the calls of its LLM API. When a sequence's turn has come is `Admission`'s to say, what its words mean is in
`requests` and `outputs`. A name that is dropped is over everywhere: here, in the queue and in TensorRT-LLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvolt.core.errors import EngineFailed, InvalidRequest, KvoltError
from kvolt.core.hashing import request_seed
from kvolt.engines.external.answers import Choice, News
from kvolt.engines.external.resuming import given_tokens
from kvolt.engines.kv_formats.trtllm_seeds import SeedBook
from kvolt.engines.trtllm.admission import Admission
from kvolt.engines.trtllm.launch import Launched
from kvolt.engines.trtllm.loras import Adapters
from kvolt.engines.trtllm.outputs import Reader
from kvolt.engines.trtllm.requests import sampling_params
from kvolt.engines.trtllm.tickets import ContextState, context_params, generation_params
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

Tell = Callable[[Choice, News], None]
Fail = Callable[[Choice, KvoltError], None]


@dataclass(slots=True)
class Sequences:
    """See the module. `tell` and `fail` hear what becomes of answers."""

    running: Launched
    adapters: Adapters
    admission: Admission
    seeds: SeedBook
    crew: Crew
    tell: Tell
    fail: Fail
    _turns: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _results: dict[str, Any] = field(default_factory=dict)
    _lora_seeds: dict[str, set[int]] = field(default_factory=dict)
    """Of the blocks of each adapter: salts make several."""
    num_heard: int = 0
    """Words of TensorRT-LLM's about whatever sequence, ever: it lives while there are more."""

    def answer(self, choice: Choice, state: ContextState | None) -> None:
        """From the state that a prompt was computed to, if there is one."""
        self._queue(choice)
        name = choice.engine_id
        self._tasks[name] = self.crew.start(self._answer(choice, state), "answer")
        self.admit()

    async def compute_prompt(self, choice: Choice) -> Any:
        """A context-only result. Kept until it is dropped. EngineFailed, InvalidRequest."""
        self._queue(choice, for_others=True)
        self.admit()
        await self._turn(choice.engine_id)
        result = self._generate(choice, None, for_others=True)
        try:
            await result
        except Exception as error:
            raise _as_ours(error) from error
        self.num_heard += 1
        return result

    def keep(self, name: str) -> None:
        self.admission.hold(name)
        self.admit()

    def drop(self, name: str) -> None:
        """Wherever it is. Unknown names are no error."""
        self.admission.drop(name)
        self.seeds.end(name)
        self._turns.pop(name, None)
        result = self._results.pop(name, None)
        if result is not None:
            _abort(result)
        task = self._tasks.pop(name, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self.admit()

    def clear(self) -> None:
        for name in [*self._tasks, *self._results]:
            self.drop(name)
        self.admission.clear()

    def admit(self) -> None:
        for name in self.admission.admit():
            turn = self._turns.pop(name, None)
            if turn is not None and not turn.done():
                turn.set_result(None)

    def seeds_of(self, lora: str) -> set[int]:
        """Of all blocks that were made with an adapter; asked when it is gone, and forgotten."""
        return self._lora_seeds.pop(lora, set())

    # ---

    def _queue(self, choice: Choice, *, for_others: bool = False) -> None:
        request, block_size = choice.request, self.running.info.block_size
        tokens = given_tokens(request, choice.index)
        name = choice.engine_id
        seed = request_seed(request.lora, request.salt)
        if request.lora:
            self._lora_seeds.setdefault(request.lora, set()).add(seed)
        self.seeds.begin(name, seed, tokens)
        self._turns[name] = asyncio.get_running_loop().create_future()
        self.admission.add(name, -(-len(tokens) // block_size), for_others=for_others)

    async def _turn(self, name: str) -> None:
        turn = self._turns.get(name)
        if turn is not None:
            await turn

    async def _answer(self, choice: Choice, state: ContextState | None) -> None:
        name = choice.engine_id
        try:
            await self._turn(name)
            result = self._generate(choice, state)
            first = () if state is None else state.first_gen_tokens
            reader = Reader(choice, frozenset(self.running.card.eos_token_ids), first)
            is_over = False
            async for _ in result:
                self.num_heard += 1
                news = reader.read(result)
                if news is None:
                    continue
                self.seeds.grow(name, news.token_ids)
                is_over = news.finish is not None
                self.tell(choice, news)
                if is_over:
                    break
            if not is_over:
                raise EngineFailed("TensorRT-LLM ended the request without an end", engine="trtllm")
            if result.finished:  # else it is ended by us, below
                self._results.pop(name, None)
        except Exception as error:
            self.fail(choice, _as_ours(error))
        self.drop(name)

    def _generate(self, choice: Choice, state: ContextState | None, for_others: bool = False) -> Any:
        """Hand it over. What TensorRT-LLM refuses is the request's fault."""
        request = choice.request
        eos = self.running.card.eos_token_ids
        disaggregated = None
        if for_others:
            disaggregated, max_tokens = context_params(), 1
        elif state is not None:  # it counts the tokens that came with the prompt
            disaggregated, max_tokens = generation_params(state), request.stop.max_tokens
        else:
            max_tokens = request.stop.max_tokens - choice.num_tokens
        tokens = list(request.token_ids) if disaggregated is not None else given_tokens(request, choice.index)
        try:
            result = self.running.llm.generate_async(
                tokens,
                sampling_params=sampling_params(choice, eos, max_tokens=max_tokens),
                lora_request=self.adapters.loaded.find(request.lora),
                streaming=not for_others,
                disaggregated_params=disaggregated,
                cache_salt=request.salt or None,
            )
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"TensorRT-LLM refuses it: {error}", param="request") from error
        self._results[choice.engine_id] = result
        return result


def _abort(result: Any) -> None:
    try:
        result.abort()
    except Exception as error:  # who lets go of it cannot help it; if TensorRT-LLM is dead, others see that
        log.warning("TensorRT-LLM cannot be told to stop a request: %r", error)


def _as_ours(error: Exception) -> KvoltError:
    """Of a request that went wrong. Anything else is raised: before it tells such an error it shuts itself down."""
    from tensorrt_llm.llmapi import RequestError

    if isinstance(error, KvoltError):
        return error
    if isinstance(error, RequestError | AssertionError | ValueError):
        return EngineFailed(f"TensorRT-LLM gave up on the request: {error}", engine="trtllm")
    raise error
