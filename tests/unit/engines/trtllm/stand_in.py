"""A stand-in for the package `tensorrt_llm`: the names of its LLM API as its source has them, over a tiny scheduler.

What is here was read there (docs/trtllm.md says where); what was not read is not here. The model is a hash: a token
follows from all tokens before it, the seed and the adapter, so its sampler draws by position, which nothing says of the
real one. One iteration computes a chunk of prompts and a token of every answer, tells events and figures, then answers.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import struct
import sys
from dataclasses import dataclass, field, fields
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from xxhash import xxh3_64_intdigest as xxh3

VOCAB_SIZE = 1000
EOS = 2
ENDS = 7
"""A prompt that begins with it has answers that end."""

# --- what requests are made of


class RequestError(RuntimeError):
    """The error raised when the request is failed."""


class AsyncQueue:
    def __init__(self) -> None:
        self._q: collections.deque[Any] = collections.deque()
        self._event = asyncio.Event()

    def put(self, item: Any) -> None:
        self._q.append(item)
        self._event.set()

    async def get(self, timeout: float | None = None) -> Any:
        if timeout is None:
            while not self._q:
                await self._event.wait()
        elif timeout > 0:
            async with asyncio.timeout(timeout):
                while not self._q:
                    await self._event.wait()
        elif not self._q:
            raise asyncio.QueueEmpty
        item = self._q.popleft()
        if not self._q:
            self._event.clear()
        return item


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: str | dict | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        num_guides = sum(bool(getattr(self, each.name)) for each in fields(self))
        if num_guides > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {num_guides}.")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad_token_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()

    @property
    def _greedy_decoding(self) -> bool:
        none = self.temperature is None and self.top_p is None and self.top_k is None
        return none or self.top_k == 1 or self.top_p == 0.0 or self.temperature == 0


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if self.request_type not in (None, "context_only", "generation_only", "context_and_generation"):
            raise ValueError(f"Unknown request type: {self.request_type}.")


@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if self.lora_path is not None and not os.path.exists(self.lora_path):
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")


# --- what it is started with


class ValidationError(ValueError):
    """As pydantic's."""


def _strict(kind: Any, given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    known = {each.name for each in fields(kind)}
    for name in given:
        if name not in known:
            raise ValidationError(f"{kind.__name__}: {name}: Extra inputs are not permitted")
    return kind(**given)


@dataclass
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    tokens_per_block: int = 32


@dataclass
class CacheTransceiverConfig:
    backend: str | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None


@dataclass
class TorchLlmArgs:
    model: str
    tensor_parallel_size: int = 1
    enable_attention_dp: bool = False
    enable_lora: bool = False
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    guided_decoding_backend: str | None = None
    cache_transceiver_config: CacheTransceiverConfig | None = None
    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = 8192
    disable_overlap_scheduler: bool = False
    enable_iter_perf_stats: bool = False

    def __post_init__(self) -> None:
        self.kv_cache_config = _strict(KvCacheConfig, self.kv_cache_config)
        self.cache_transceiver_config = _strict(CacheTransceiverConfig, self.cache_transceiver_config)


# --- what comes back


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None


@dataclass(slots=True)
class _Response:
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cached_tokens: int = 0
    finish_reason: str | None = None
    is_final: bool = False
    context: DisaggregatedParams | None = None
    error: Exception | None = None


class RequestOutput:
    """With GenerationResult, from which it takes most."""

    def __init__(self, llm: LLM, request_id: int, sampling: SamplingParams) -> None:
        self._llm = llm
        self.request_id = request_id
        self.sampling_params = sampling
        self.aqueue = AsyncQueue()
        self.cached_tokens = 0
        self._done = False
        self._aborted = False
        self.outputs = [CompletionOutput(0)]

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._llm.abort_request(self.request_id)
        self._aborted = True

    def _handle_response(self, response: _Response) -> None:
        if response.error is not None:
            raise response.error
        self._done = response.is_final
        self.cached_tokens = response.cached_tokens
        output = self.outputs[0]
        output.disaggregated_params = response.context
        output.token_ids.extend(response.tokens)
        output.logprobs += response.logprobs
        if response.finish_reason == "cancelled" or self._done:
            output.finish_reason = response.finish_reason
        stops = self.sampling_params.stop_token_ids or []
        if output.finish_reason == "stop" and output.token_ids[-1] in stops:
            output.stop_reason = output.token_ids[-1]
            if not self.sampling_params.include_stop_str_in_output:
                output.token_ids = output.token_ids[:-1]

    async def aresult(self) -> RequestOutput:
        while not self._done:
            self._handle_response(await self.aqueue.get())
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        self._handle_response(await self.aqueue.get())
        return self


class IterationResult:
    def __init__(self) -> None:
        self._done = False
        self._timeout: float | None = 2
        self.aqueue = AsyncQueue()

    def set_timeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def mark_undone(self) -> None:
        self._done = False

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> Any:
        if self._done:
            raise StopAsyncIteration
        try:
            return json.loads(await self.aqueue.get(timeout=self._timeout))
        except TimeoutError:
            self._done = True
            raise StopAsyncIteration from None


# --- the model and its cache


def next_token(tokens: list[int], params: SamplingParams, lora: int) -> tuple[int, int]:
    """The token, and a number that goes with it."""
    seed = 0 if params._greedy_decoding else (params.seed or 0)
    drawn = xxh3(struct.pack(f"<{len(tokens)}I", *tokens), (seed * 31 + lora) % (1 << 64))
    if tokens[0] == ENDS and drawn % 11 == 0:
        return EOS, drawn
    return 10 + drawn % (VOCAB_SIZE - 10), drawn


def _logprobs(token: int, drawn: int, wanted: int) -> dict[int, Logprob]:
    """Every other time the token is not among the most likely ones."""
    others = [(token + number) % VOCAB_SIZE for number in range(1, wanted + 1)]
    ranked = [token, *others[: wanted - 1]] if drawn % 2 else [*others, token]
    return {each: Logprob(-0.25 * (rank + 1), rank + 1) for rank, each in enumerate(ranked)}


@dataclass(eq=False)
class _Block:
    number: int
    parent: int | None
    level_tokens: tuple[int, ...]
    users: int = 0
    children: int = 0
    used_at: int = 0


class _Cache:
    """Blocks by hash, leaves evicted first, the least recently used of them."""

    def __init__(self, config: KvCacheConfig, tell: Any) -> None:
        self.size = config.tokens_per_block
        self.total = (config.max_tokens or 64 * self.size) // self.size
        self.blocks: dict[int, _Block] = {}
        self.private = 0
        """Blocks of requests that are not filled, or that another has filled as well."""
        self.clock = 0
        self._emit = tell

    @property
    def used(self) -> int:
        return self.private + sum(1 for each in self.blocks.values() if each.users)

    def name(self, tokens: tuple[int, ...], parent: int | None, extra: tuple[Any, ...]) -> int:
        return xxh3(repr((tokens, parent, extra if parent is None else ())).encode())

    def match(self, tokens: list[int], extra: tuple[Any, ...]) -> list[_Block]:
        found: list[_Block] = []
        for start in range(0, (len(tokens) - 1) // self.size * self.size, self.size):
            parent = found[-1].number if found else None
            block = self.blocks.get(self.name(tuple(tokens[start : start + self.size]), parent, extra))
            if block is None:
                break
            found.append(block)
        return found

    def take(self, num_blocks: int) -> bool:
        """Room for so many private ones; others are evicted for them."""
        while self.private + len(self.blocks) + num_blocks > self.total:
            leaves = [each for each in self.blocks.values() if not (each.users or each.children)]
            if not leaves:
                return False
            oldest = min(leaves, key=lambda each: each.used_at)
            self.drop(oldest)
        self.private += num_blocks
        return True

    def drop(self, block: _Block) -> None:
        del self.blocks[block.number]
        if block.parent is not None:
            self.blocks[block.parent].children -= 1
        self._emit({"type": "removed", "block_hashes": [block.number]})

    def use(self, block: _Block) -> None:
        self.clock += 1
        block.users += 1
        block.used_at = self.clock


@dataclass(eq=False)
class _Sequence:
    result: RequestOutput
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    extra: tuple[Any, ...]
    disaggregated: DisaggregatedParams | None
    num_computed: int = 0
    num_cached: int = 0
    blocks: list[_Block] = field(default_factory=list)
    num_private: int = 0
    is_prompt_told: bool = False
    said: list[int] = field(default_factory=list)


TRANSFERS: dict[bytes, tuple[Any, _Sequence]] = {}
"""Prompts that wait to be fetched, of whatever LLM in this process."""


class LLM:
    """Everything on the loop of the first request."""

    made: ClassVar[list[LLM]] = []

    def __init__(self, model: str, **kwargs: Any) -> None:
        known = {each.name for each in fields(TorchLlmArgs)}
        for key in kwargs:
            if key not in known:
                raise ValueError(f"LLM got invalid argument: {key}")
        self.args = TorchLlmArgs(model=model, **kwargs)
        self.calls: list[SimpleNamespace] = []
        self.error: str | None = None
        """What the next iteration goes wrong by: of one request."""
        self.collapse: Exception | None = None
        """Of all of it."""
        self.is_stalled = False
        self.is_shut = False
        self._events: collections.deque[dict[str, Any]] = collections.deque()
        self._event_id = 0
        self.cache = _Cache(self.args.kv_cache_config, self._event)
        self._event({"type": "created", "num_blocks_per_cache_level": [self.cache.total, 0]})
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._held: list[_Sequence] = []
        self._partial: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Event | None = None
        self._iter = 0
        self._iter_stats_result: IterationResult | None = None
        self._iter_kv_events_result: IterationResult | None = None
        LLM.made.append(self)

    # --- its interface

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        if self.is_shut:
            raise RuntimeError("LLM is shutting down")
        params = sampling_params or SamplingParams()
        if params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if disaggregated_params is not None and disaggregated_params.request_type == "context_only":
            params.max_tokens = 1
        limit = self.args.max_num_tokens
        if not self.args.enable_chunked_prefill and limit and len(inputs) > limit:
            raise ValueError(f"The sum of prompt length should not exceed max_num_tokens ({limit})")
        self._open()
        self.calls.append(
            SimpleNamespace(
                inputs=list(inputs),
                params=params,
                lora=lora_request,
                disaggregated=disaggregated_params,
                cache_salt=cache_salt,
                streaming=streaming,
            )
        )
        result = RequestOutput(self, len(self.calls), params)
        extra = (lora_request.lora_int_id if lora_request is not None else 0, cache_salt)
        sequence = _Sequence(result, list(inputs), len(inputs), params, extra, disaggregated_params)
        self._waiting.append(sequence)
        assert self._wake is not None
        self._wake.set()
        return result

    def get_stats_async(self, timeout: float | None = 2) -> Any:
        assert self._iter_stats_result is not None, "AFTER prompts have been submitted"
        self._iter_stats_result.set_timeout(timeout)
        return self._iter_stats_result

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        assert self._iter_kv_events_result is not None, (
            "KV Event IterationResult is not properly instantiated."
        )
        self._iter_kv_events_result.set_timeout(timeout)
        return self._iter_kv_events_result

    def abort_request(self, request_id: int) -> None:
        for sequences in (self._waiting, self._running, self._held):
            for each in [each for each in sequences if each.result.request_id == request_id]:
                sequences.remove(each)
                self._free(each)
                TRANSFERS.pop(self._state(each), None)
                self._answer(each, _Response([], [], finish_reason="cancelled", is_final=True))

    def shutdown(self) -> None:
        self.is_shut = True
        if self._task is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)

    # --- its loop

    def _open(self) -> None:
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._wake = asyncio.Event()
            self._task = self._loop.create_task(self._run())
        if self._iter_stats_result is None:
            self._iter_stats_result, self._iter_kv_events_result = IterationResult(), IterationResult()
        else:
            self._iter_stats_result.mark_undone()
            assert self._iter_kv_events_result is not None
            self._iter_kv_events_result.mark_undone()

    async def _run(self) -> None:
        assert self._wake is not None
        while True:
            await asyncio.sleep(0.0005)
            while not (self._waiting or self._running) or self.is_stalled:
                self._wake.clear()
                await self._wake.wait()
            self._step()

    def _event(self, data: dict[str, Any]) -> None:
        size = self.args.kv_cache_config.event_buffer_max_size
        if not size:
            return
        self._events.append(
            {"event_id": self._event_id, "data": data, "window_size": self.args.max_seq_len or 4096}
        )
        self._event_id += 1
        while len(self._events) > size:  # the oldest go
            self._events.popleft()

    def _answer(self, sequence: _Sequence, response: _Response) -> None:
        response.cached_tokens = sequence.num_cached
        sequence.result.aqueue.put(response)

    def _step(self) -> None:
        answers: list[tuple[_Sequence, _Response]] = []
        if self._partial:
            self._event({"type": "removed", "block_hashes": self._partial})
            self._partial = []
        self._admit(answers)
        budget = self.args.max_num_tokens or 8192
        for each in list(self._running):
            if each.num_computed < len(each.tokens) - 1 and not each.is_prompt_told:
                chunk = min(budget, each.num_prompt - each.num_computed)
                budget -= chunk
                each.num_computed += chunk
                if each.num_computed < each.num_prompt:
                    continue
            each.is_prompt_told = True
            answers.append((each, self._advance(each)))
        self._emit()
        if self.collapse is not None:
            for each, _ in answers:
                self._answer(each, _Response([], [], error=self.collapse))
            return
        for each, response in answers:
            if self.error is not None and response.error is None:
                response.error, self.error = RequestError(self.error), None
                self._end(each)
            self._answer(each, response)

    def _admit(self, answers: list[tuple[_Sequence, _Response]]) -> None:
        while self._waiting and len(self._running) < (self.args.max_batch_size or 64):
            each = self._waiting[0]
            kind = each.disaggregated.request_type if each.disaggregated is not None else None
            transfer = None
            if kind == "generation_only":
                transfer = TRANSFERS.pop(each.disaggregated.opaque_state or b"", None)
                if transfer is None:
                    self._waiting.pop(0)
                    answers.append((each, _Response([], [], error=RequestError("no such context request"))))
                    continue
            matched = self.cache.match(each.tokens, each.extra)
            needed = -(-(each.num_prompt + each.params.max_tokens) // self.cache.size) - len(matched)
            for block in matched:
                self.cache.use(block)
            if not self.cache.take(needed):
                for block in matched:
                    block.users -= 1
                if transfer is not None:
                    TRANSFERS[each.disaggregated.opaque_state or b""] = transfer
                return
            self._waiting.pop(0)
            each.blocks, each.num_private = matched, needed
            each.num_cached = each.num_computed = len(matched) * self.cache.size
            if transfer is not None:
                owner, held = transfer
                owner._held.remove(held)
                owner._free(held)
                each.num_computed = each.num_prompt
                each.is_prompt_told = True
                first = list(each.disaggregated.first_gen_tokens or ())
                each.tokens += first
                each.said += first
                self._fill(each)
                answers.append((each, _Response(first, [])))
            self._running.append(each)

    def _advance(self, each: _Sequence) -> _Response:
        """One token more."""
        each.num_computed = len(each.tokens)
        self._fill(each)
        params = each.params
        token, drawn = next_token(each.tokens, params, each.extra[0])
        each.tokens.append(token)
        each.said.append(token)
        logprobs = [_logprobs(token, drawn, params.logprobs)] if params.logprobs else []
        reason = None
        if token == params.end_id and not params.ignore_eos:
            reason = "stop"
        elif len(each.said) >= params.max_tokens:
            reason = "length"
        elif token in (params.stop_token_ids or ()):
            reason = "stop"
        response = _Response([token], logprobs, finish_reason=reason, is_final=reason is not None)
        if each.disaggregated is not None and each.disaggregated.request_type == "context_only":
            response.finish_reason, response.is_final = "not_finished", True
            state = self._state(each)
            response.context = DisaggregatedParams(
                request_type="context_only",
                first_gen_tokens=[token],
                ctx_request_id=each.result.request_id,
                opaque_state=state,
            )
            TRANSFERS[state] = (self, each)
            self._running.remove(each)
            self._held.append(each)
        elif reason is not None:
            self._end(each)
        return response

    def _state(self, each: _Sequence) -> bytes:
        return f"{id(self)}/{each.result.request_id}".encode()

    def _fill(self, each: _Sequence) -> None:
        """Blocks that are full are found by others from now on, unless another one has filled them before."""
        size = self.cache.size
        stored: list[_Block] = []
        while (len(each.blocks) + 1) * size <= each.num_computed and each.num_private:
            start = len(each.blocks) * size
            tokens = tuple(each.tokens[start : start + size])
            parent = each.blocks[-1].number if each.blocks else None
            number = self.cache.name(tokens, parent, each.extra)
            block = self.cache.blocks.get(number)
            if block is None:
                block = self.cache.blocks[number] = _Block(number, parent, tokens)
                if parent is not None:
                    self.cache.blocks[parent].children += 1
                stored.append(block)
            each.num_private -= 1
            self.cache.private -= 1
            self.cache.use(block)
            each.blocks.append(block)
        if stored:
            self._event(_stored(stored))

    def _end(self, each: _Sequence) -> None:
        if each in self._running:
            self._running.remove(each)
        rest = each.tokens[len(each.blocks) * self.cache.size : each.num_computed]
        if rest:
            parent = each.blocks[-1].number if each.blocks else None
            block = _Block(self.cache.name(tuple(rest), parent, each.extra), parent, tuple(rest))
            self._event(_stored([block]))
            self._partial.append(block.number)
        self._free(each)

    def _free(self, each: _Sequence) -> None:
        for block in each.blocks:
            block.users -= 1
        self.cache.private -= each.num_private
        each.blocks, each.num_private = [], 0

    def _emit(self) -> None:
        assert self._iter_stats_result is not None
        assert self._iter_kv_events_result is not None
        while self._events:
            self._iter_kv_events_result.aqueue.put(json.dumps(self._events.popleft()))
        self._iter += 1
        if self.args.enable_iter_perf_stats:
            self._iter_stats_result.aqueue.put(
                json.dumps(
                    {
                        "iter": self._iter,
                        "iterLatencyMS": 0.5,
                        "numActiveRequests": len(self._running),
                        "numQueuedRequests": len(self._waiting),
                        "maxNumActiveRequests": self.args.max_batch_size or 64,
                        "kvCacheStats": {
                            "maxNumBlocks": self.cache.total,
                            "freeNumBlocks": self.cache.total - self.cache.used,
                            "usedNumBlocks": self.cache.used,
                            "tokensPerBlock": self.cache.size,
                        },
                    }
                )
            )


def _stored(blocks: list[_Block]) -> dict[str, Any]:
    """As KVCacheEventSerializer has it: neither adapter nor salt."""
    return {
        "type": "stored",
        "parent_hash": blocks[0].parent,
        "blocks": [
            {
                "type": "stored_block",
                "block_hash": each.number,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in each.level_tokens
                ],
                "cache_level": 0,
                "priority": 35,
            }
            for each in blocks
        ],
    }


def install(monkeypatch: Any, version: str = "1.2.1") -> ModuleType:
    """As if the package were installed, for the time of a test. Its `llmapi`."""
    from kvolt.engines.external import requirements

    package, api = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    names = (
        LLM,
        RequestOutput,
        CompletionOutput,
        SamplingParams,
        GuidedDecodingParams,
        DisaggregatedParams,
        LoRARequest,
        RequestError,
        KvCacheConfig,
        CacheTransceiverConfig,
        TorchLlmArgs,
    )
    for kind in names:
        setattr(api, kind.__name__, kind)
    package.llmapi = api  # type: ignore[attr-defined]
    package.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", api)
    monkeypatch.setattr(requirements, "version", lambda name: version)
    monkeypatch.setattr(LLM, "made", [])
    TRANSFERS.clear()
    return api
