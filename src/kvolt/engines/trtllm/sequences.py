"""Sequences (one per choice or prompt) of TensorRT-LLM, from queueing to their end.

Owns the calls of its LLM API. `Admission` decides when a sequence starts; `requests` and `outputs` convert formats. A
dropped sequence is removed here, from the queue and from TensorRT-LLM.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvolt.core.errors import EngineFailed, InvalidRequest, KvoltError
from kvolt.core.hashing import request_seed
from kvolt.engines.external.answers import Choice, ChoiceOutput
from kvolt.engines.external.loras import LoadedLoras
from kvolt.engines.external.requests import input_tokens
from kvolt.engines.kv_formats.trtllm_seeds import SequenceSeeds
from kvolt.engines.trtllm.admission import Admission
from kvolt.engines.trtllm.launch import Launched
from kvolt.engines.trtllm.outputs import Reader
from kvolt.engines.trtllm.requests import sampling_params
from kvolt.engines.trtllm.tickets import ContextState, context_params, generation_params
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)


class Adapters(LoadedLoras[Any]):
    """TensorRT-LLM's LoRARequest per adapter. It loads an adapter at the first request that uses it.

    Numbers are never reused, since blocks are cached under them."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def add(self, name: str, path: str) -> None:
        """Add an adapter. InvalidRequest if the folder is missing or the name is in use."""
        from tensorrt_llm.llmapi import LoRARequest

        known = self.get(name)
        if known is not None:
            if known.lora_path != path:
                raise InvalidRequest(f"adapter {name!r} is loaded from {known.lora_path}", param="lora")
            return
        try:
            self[name] = LoRARequest(name, next(self._numbers), path)
        except ValueError as error:
            raise InvalidRequest(f"TensorRT-LLM refuses adapter {name!r}: {error}", param="lora") from error


OnOutput = Callable[[Choice, ChoiceOutput], None]
OnFailure = Callable[[Choice, KvoltError], None]


@dataclass(slots=True)
class Sequences:
    """See the module. `on_output`, `on_failure`: called with the output and errors of answers."""

    running: Launched
    adapters: Adapters
    admission: Admission
    seeds: SequenceSeeds
    task_group: TaskGroup
    on_output: OnOutput
    on_failure: OnFailure
    _turns: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _results: dict[str, Any] = field(default_factory=dict)
    _lora_seeds: dict[str, set[int]] = field(default_factory=dict)
    """Block hash seeds per adapter; one per salt."""
    num_outputs: int = 0
    """Outputs of all sequences so far; grows while the engine is alive."""

    def answer(self, choice: Choice, state: ContextState | None) -> None:
        """Generate a choice, from the state of a remote prefill if there is one."""
        self._queue(choice)
        name = choice.engine_id
        self._tasks[name] = self.task_group.start(self._answer(choice, state), "answer")
        self.admit()

    async def compute_prompt(self, choice: Choice) -> Any:
        """Compute a prompt; its result is held until `drop`. EngineFailed, InvalidRequest."""
        self._queue(choice, is_context_only=True)
        self.admit()
        await self._wait_turn(choice.engine_id)
        result = self._generate(choice, None, is_context_only=True)
        try:
            await result
        except Exception as error:
            raise _to_kvolt_error(error) from error
        self.num_outputs += 1
        return result

    def hold(self, name: str) -> None:
        self.admission.hold(name)
        self.admit()

    def drop(self, name: str) -> None:
        """Remove a sequence in any state. Unknown names are ignored."""
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
        """Remove and return the block hash seeds of an adapter."""
        return self._lora_seeds.pop(lora, set())

    # ---

    def _queue(self, choice: Choice, *, is_context_only: bool = False) -> None:
        request, block_size = choice.request, self.running.info.block_size
        tokens = input_tokens(request, choice.index)
        name = choice.engine_id
        seed = request_seed(request.lora, request.salt)
        if request.lora:
            self._lora_seeds.setdefault(request.lora, set()).add(seed)
        self.seeds.begin(name, seed, tokens)
        self._turns[name] = asyncio.get_running_loop().create_future()
        self.admission.add(name, -(-len(tokens) // block_size), is_context_only=is_context_only)

    async def _wait_turn(self, name: str) -> None:
        turn = self._turns.get(name)
        if turn is not None:
            await turn

    async def _answer(self, choice: Choice, state: ContextState | None) -> None:
        name = choice.engine_id
        try:
            await self._wait_turn(name)
            result = self._generate(choice, state)
            first = () if state is None else state.first_gen_tokens
            reader = Reader(choice, frozenset(self.running.card.eos_token_ids), first)
            is_finished = False
            async for _ in result:
                self.num_outputs += 1
                output = reader.read(result)
                if output is None:
                    continue
                self.seeds.grow(name, output.token_ids)
                is_finished = output.finish is not None
                self.on_output(choice, output)
                if is_finished:
                    break
            if not is_finished:
                raise EngineFailed("TensorRT-LLM ended the stream without a finish reason", engine="trtllm")
            if result.finished:  # otherwise `drop` aborts it
                self._results.pop(name, None)
        except Exception as error:
            self.on_failure(choice, _to_kvolt_error(error))
        self.drop(name)

    def _generate(self, choice: Choice, state: ContextState | None, is_context_only: bool = False) -> Any:
        """Submit to TensorRT-LLM. InvalidRequest if it refuses."""
        request = choice.request
        eos = self.running.card.eos_token_ids
        disaggregated = None
        if is_context_only:
            disaggregated, max_tokens = context_params(), 1
        elif state is not None:  # its count includes the first tokens
            disaggregated, max_tokens = generation_params(state), request.stop.max_tokens
        else:
            max_tokens = request.stop.max_tokens - choice.num_tokens
        tokens = list(request.token_ids) if disaggregated is not None else input_tokens(request, choice.index)
        try:
            result = self.running.llm.generate_async(
                tokens,
                sampling_params=sampling_params(choice, eos, max_tokens=max_tokens),
                lora_request=self.adapters.find(request.lora),
                streaming=not is_context_only,
                disaggregated_params=disaggregated,
                cache_salt=request.salt or None,
            )
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"TensorRT-LLM refuses the request: {error}", param="request") from error
        self._results[choice.engine_id] = result
        return result


def _abort(result: Any) -> None:
    try:
        result.abort()
    except Exception as error:  # a dead engine is detected elsewhere
        log.warning("abort failed: engine=TensorRT-LLM error=%r", error)


def _to_kvolt_error(error: Exception) -> KvoltError:
    """Convert the error of a single request. Other errors are raised: TensorRT-LLM shuts itself down before them."""
    from tensorrt_llm.llmapi import RequestError

    if isinstance(error, KvoltError):
        return error
    if isinstance(error, RequestError | AssertionError | ValueError):
        return EngineFailed(f"TensorRT-LLM failed the request: {error}", engine="trtllm")
    raise error
