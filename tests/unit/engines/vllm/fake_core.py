"""The stand-in's engine core: a scheduler and a block pool in the manner of vLLM's, on the loop of who reads it.

The model is a hash: a token follows from all before it, the adapter, the seed and how often the request has drawn. Of
a request that resumes the draws behind it are taken from `kvolt_resumed`, as `worker_extension` has vLLM do it.
Events are published before the outputs of their step, and heard before its next: nothing has to be waited for.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from tests.unit.engines.external.publisher import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Publisher,
    payload_of,
)
from xxhash import xxh3_64_intdigest as xxh3

VOCAB_SIZE = 1000
EOS, OTHER_EOS = 2, 5
ENDS = 7
"""A prompt that begins with it has answers that end."""
BLOCK_BYTES, READ_S = 4096, 0.25
_RESUMED, _RELEASE = "kvolt_resumed", "kvolt_release"

# --- what goes in and out


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return ("stop", "length", "abort", "error", "repetition")[self.value]


class EngineCoreRequest(msgspec.Struct, omit_defaults=True):
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    client_index: int = 0
    priority: int = 0
    external_req_id: str | None = None
    abort_immediately: bool = False
    prompt_embeds: Any = None


class LogprobsLists(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any


@dataclass
class PrefillStats:
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0


@dataclass
class SchedulerStats:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    kv_connector_stats: dict[str, Any] | None = None


class EngineCoreOutput(msgspec.Struct, omit_defaults=True):
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prefill_stats: PrefillStats | None = None


class EngineCoreOutputs(msgspec.Struct, omit_defaults=True):
    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0


# --- the model


def next_token(tokens: list[int], params: Any, num_draws: int, lora: str) -> tuple[int, int]:
    """The token, and a number that goes with it."""
    drawn_by = "greedy" if params.temperature < 1e-5 else f"{params.seed}/{num_draws}"
    drawn = xxh3(struct.pack(f"<{len(tokens)}I", *tokens), xxh3(f"{drawn_by}/{lora}".encode()))
    if tokens[0] == ENDS and drawn % 11 == 0:
        return (EOS if drawn % 2 else OTHER_EOS), drawn
    return 10 + drawn % (VOCAB_SIZE - 10), drawn


def logprob_row(token: int, drawn: int, wanted: int) -> tuple[list[int], list[float]]:
    """The token, then the most likely ones; every other time it is not among them."""
    others = [(token + number) % VOCAB_SIZE for number in range(1, wanted + 1)]
    is_top = drawn % 2 and wanted
    top = [token, *others][:wanted] if is_top else others
    values = [-0.25 * (rank + 1) for rank in range(wanted)]
    return [token, *top], [values[0] if is_top else -0.25 * (wanted + 2), *values]


def logprobs_of(rows: list[tuple[list[int], list[float]]]) -> LogprobsLists:
    ids, values = [row[0] for row in rows], [row[1] for row in rows]
    return LogprobsLists(np.array(ids), np.array(values), np.zeros(len(rows), int))


# --- blocks


@dataclass(eq=False, slots=True)
class Block:
    name: int | None = None
    num_users: int = 0


@dataclass(eq=False)
class Sequence:
    request: EngineCoreRequest
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_before: int = 0
    """Draws of its tokens elsewhere."""
    blocks: list[Block] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    """Of its full blocks that are cached."""
    said: list[int] = field(default_factory=list)
    stats: PrefillStats | None = None
    is_begun: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.num_before = (self.params.extra_args or {}).get(_RESUMED, 0)

    @property
    def params(self) -> Any:
        return self.request.sampling_params

    @property
    def transfer(self) -> dict[str, Any]:
        return (self.params.extra_args or {}).get("kv_transfer_params") or {}

    @property
    def lora(self) -> str:
        return self.request.lora_request.lora_name if self.request.lora_request is not None else ""

    def keys(self, index: int) -> tuple[str, ...]:
        """What a block is made of besides its tokens."""
        salt = self.request.cache_salt if index == 0 else None
        return tuple(key for key in (self.lora, salt) if key)


class Pool:
    """Blocks with a hash can be found as long as they are not needed; copies are told as often as they are."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.num_blocks = num_blocks
        self.free: dict[Block, None] = {Block(): None for _ in range(num_blocks)}
        self.named: dict[int, dict[Block, None]] = {}
        self.events: list[Any] = []

    @property
    def usage(self) -> float:
        return 1.0 - len(self.free) / self.num_blocks

    def name_of(self, sequence: Sequence, index: int, parent: int | None) -> int:
        tokens = sequence.tokens[index * self.size : (index + 1) * self.size]
        return xxh3(repr((parent, tokens, sequence.keys(index))).encode())

    def match(self, sequence: Sequence) -> list[Block]:
        found: list[Block] = []
        for index in range((len(sequence.tokens) - 1) // self.size):
            named = self.named.get(self.name_of(sequence, index, found[-1].name if found else None))
            if not named:
                break
            found.append(next(iter(named)))
        return found

    def use(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.num_users += 1
            self.free.pop(block, None)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room for so many of its tokens; False where there is none."""
        num_new = -(-num_tokens // self.size) - len(sequence.blocks)
        if num_new > len(self.free):
            return False
        for _ in range(num_new):
            block = next(iter(self.free))
            del self.free[block]
            if block.name is not None:
                named = self.named[block.name]
                del named[block]
                if not named:
                    del self.named[block.name]
                self.events.append(BlockRemoved([block.name], "GPU", 0))
            block.name, block.num_users = None, 1
            sequence.blocks.append(block)
        return True

    def seal(self, sequence: Sequence) -> None:
        first, end = len(sequence.names), sequence.num_computed // self.size
        for index in range(first, end):
            parent = sequence.names[-1] if sequence.names else None
            name = self.name_of(sequence, index, parent)
            sequence.names.append(name)
            block = sequence.blocks[index]
            block.name = name
            self.named.setdefault(name, {})[block] = None
        if end <= first:
            return
        lora = sequence.request.lora_request
        self.events.append(
            BlockStored(
                block_hashes=sequence.names[first:],
                parent_block_hash=sequence.names[first - 1] if first else None,
                token_ids=sequence.tokens[first * self.size : end * self.size],
                block_size=self.size,
                lora_id=lora.lora_int_id if lora is not None else None,
                medium="GPU",
                lora_name=lora.lora_name if lora is not None else None,
                extra_keys=[sequence.keys(index) or None for index in range(first, end)],
                group_idx=0,
            )
        )

    def let_go(self, sequence: Sequence) -> None:
        for block in reversed(sequence.blocks):
            block.num_users -= 1
            if not block.num_users:
                self.free[block] = None
        sequence.blocks, sequence.names, sequence.num_computed = [], [], 0

    def reset(self) -> bool:
        if len(self.free) < self.num_blocks:
            return False
        self.named.clear()
        for block in self.free:
            block.name = None
        self.events.append(AllBlocksCleared())
        return True


# --- the core


class Core:
    """Its client and itself in one."""

    cores: ClassVar[dict[str, Core]] = {}
    """Those that KV can be fetched from."""

    def __init__(self, config: Any) -> None:
        args = config.args
        self.config = config
        self.pool = Pool(args.num_gpu_blocks_override - 1, args.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.held: dict[str, Sequence] = {}
        self._reads: list[list[Any]] = []
        self.side_channel_port = 1
        self.received: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.loras: dict[int, Any] = {}
        self.slept: list[int | str | list[str] | None] = []
        self.is_paused = False
        self.refuses_reset = False
        self.gives_up: FinishReason | None = None
        """Why the next output is the end of its request."""
        self.num_batches: Callable[[], int] | None = None
        self.engine_id = f"core-{len(Core.cores)}-{id(self)}"
        Core.cores[self.engine_id] = self
        self._inputs: deque[Callable[[], None]] = deque()
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        events = config.kv_events_config
        self._publisher: Publisher | None = None
        if events is not None and events.enable_kv_cache_events and events.endpoint.startswith("ipc"):
            self._publisher = Publisher(events.endpoint, events.replay_endpoint)

    # --- its client

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {} if self._publisher is None else {0: self.config.kv_events_config}

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def get_output_async(self) -> EngineCoreOutputs:
        self._open()
        found = await self._outputs.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._post(lambda: self._add(request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self._post(lambda: self._abort(request_ids))

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return bool(await self._call(lambda: self._reset(reset_running_requests)))

    async def add_lora_async(self, lora_request: Any) -> bool:
        return bool(await self._call(lambda: self._add_lora(lora_request)))

    async def remove_lora_async(self, lora_id: int) -> bool:
        return self.loras.pop(lora_id, None) is not None

    async def sleep_async(self, level: int = 1, mode: str = "abort") -> None:
        self.slept.append(level)

    async def is_sleeping_async(self) -> bool:
        return bool(self.slept) and self.slept[-1] is not None

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        self.slept.append(tags)
        return True

    async def collective_rpc_async(self, method: str, timeout: float | None = None) -> list[Any]:
        self.slept.append(method)
        return [None]

    def shutdown(self, timeout: float | None = None) -> None:
        """Of a thread that is not the loop's."""
        Core.cores.pop(self.engine_id, None)
        if self._task is not None and self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._stop(self._task), self._loop).result(10)
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    # --- for tests

    def die(self, error: Exception) -> None:
        self._outputs.put_nowait(error)

    def put(self, outputs: EngineCoreOutputs) -> None:
        """As if a step had said it."""
        self._outputs.put_nowait(outputs)

    def pause(self) -> None:
        """It takes what it is sent, and makes no steps."""
        self.is_paused = True

    def go_on(self) -> None:
        self.is_paused = False
        self._wake.set()

    @property
    def num_unread(self) -> int:
        return self._outputs.qsize()

    # --- its loop

    def _open(self) -> None:
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = self._loop.create_task(self._run())

    def _post(self, command: Callable[[], None]) -> None:
        self._open()
        self._inputs.append(command)
        self._wake.set()

    async def _call(self, method: Callable[[], Any]) -> Any:
        """As vLLM's utility calls: what goes wrong in the core comes back as a plain Exception."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                done.set_result(method())
            except Exception as error:
                done.set_exception(Exception(f"Call to method failed: {error}"))

        self._post(command)
        return await done

    async def _stop(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait([task])

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(0)
                self._take_inputs()
                while self.is_paused or not (self.waiting or self.running):
                    self._wake.clear()
                    await self._wake.wait()
                    self._take_inputs()
                await self._step()
        except Exception as error:
            self.die(error)
            raise

    def _take_inputs(self) -> None:
        while self._inputs:
            self._inputs.popleft()()

    def _add(self, request: EngineCoreRequest) -> None:
        self.received.append(request)
        sequence = Sequence(request)
        if request.abort_immediately:
            self._release(str(sequence.transfer.get(_RELEASE)))
            return
        self.waiting.append(sequence)

    def _abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for sequence in [*self.running, *self.waiting]:
            if sequence.request.request_id in request_ids:
                (self.running if sequence in self.running else self.waiting).remove(sequence)
                self.pool.let_go(sequence)

    def _release(self, request_id: str) -> None:
        held = self.held.pop(request_id, None)
        if held is not None:
            self.pool.let_go(held)

    def _reset(self, reset_running: bool) -> bool:
        if self.refuses_reset:
            return False
        if reset_running:
            while self.running:
                self._preempt(self.running.pop())
        is_reset = self.pool.reset()
        if reset_running and not is_reset:
            raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")
        return is_reset

    def _add_lora(self, lora_request: Any) -> bool:
        if not Path(lora_request.lora_path).exists():
            raise ValueError(f"Loading lora {lora_request.lora_name} failed: No adapter found")
        self.loras[lora_request.lora_int_id] = lora_request
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.let_go(sequence)
        self.waiting.appendleft(sequence)

    # --- a step

    async def _step(self) -> None:
        scheduled = self._schedule()
        width = max((each.params.logprobs or 0 for each, _ in scheduled), default=0)
        outputs: list[EngineCoreOutput] = []
        for sequence, num_tokens in scheduled:
            sequence.num_computed += num_tokens
            self.pool.seal(sequence)
            if sequence.num_computed == len(sequence.tokens):
                outputs.append(self._say(sequence, width))
        stats = SchedulerStats(len(self.running), len(self.waiting), kv_cache_usage=self.pool.usage)
        if self._reads:
            stats.kv_connector_stats, self._reads = {"kvolt_reads": self._reads}, []
        await self._publish()
        self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs, scheduler_stats=stats))

    async def _publish(self) -> None:
        events, self.pool.events = self.pool.events, []
        if not events or self._publisher is None:
            return
        self._publisher.wait_for_reader()
        self._publisher.publish(payload_of(*events))
        while self.num_batches is not None and self.num_batches() < self._publisher.number:
            await asyncio.sleep(0)

    def _schedule(self) -> list[tuple[Sequence, int]]:
        args = self.config.args
        budget = args.max_num_batched_tokens
        scheduled: list[tuple[Sequence, int]] = []
        is_scarce = False
        at = 0
        while at < len(self.running) and budget:
            sequence = self.running[at]
            num_tokens = min(len(sequence.tokens) - sequence.num_computed, budget)
            if not self.pool.grow(sequence, sequence.num_computed + num_tokens):
                is_scarce = True
                self._preempt(self.running.pop())
                continue
            scheduled.append((sequence, num_tokens))
            budget -= num_tokens
            at += 1
        while self.waiting and budget and not is_scarce and len(self.running) < args.max_num_seqs:
            sequence = self.waiting[0]
            self._bring(sequence)
            num_tokens = min(len(sequence.tokens) - sequence.num_computed, budget)
            if not self.pool.grow(sequence, sequence.num_computed + num_tokens):
                self.pool.let_go(sequence)
                break
            self.waiting.popleft()
            self.running.append(sequence)
            scheduled.append((sequence, num_tokens))
            budget -= num_tokens
        return scheduled

    def _bring(self, sequence: Sequence) -> None:
        """What there is of it: in the cache, and elsewhere."""
        found = [] if sequence.params.skip_reading_prefix_cache else self.pool.match(sequence)
        self.pool.use(found)
        sequence.blocks = list(found)
        sequence.names = [block.name for block in found if block.name is not None]
        num_local = sequence.num_computed = len(found) * self.pool.size
        num_external = max(self._num_fetched(sequence) - num_local, 0)
        if num_external and self.pool.grow(sequence, num_local + num_external):
            sequence.num_computed += num_external
            self.pool.seal(sequence)
        if not sequence.is_begun:
            sequence.is_begun = True
            num_cached = sequence.num_computed
            sequence.stats = PrefillStats(
                len(sequence.tokens),
                len(sequence.tokens) - num_cached,
                num_cached,
                num_local,
                num_cached - num_local,
            )

    def _num_fetched(self, sequence: Sequence) -> int:
        """Tokens whose KV another core has; it lets go of it then."""
        transfer = sequence.transfer
        if not transfer.get("do_remote_prefill"):
            return 0
        transfer["do_remote_prefill"] = False
        source = Core.cores.get(transfer["remote_engine_id"])
        if source is None or transfer["remote_request_id"] not in source.held:
            return 0  # it did not come: computed again
        source._release(transfer["remote_request_id"])
        num_blocks = len(transfer["remote_block_ids"][0])
        self._reads.append([sequence.request.request_id, num_blocks * BLOCK_BYTES, READ_S])
        return min(transfer["remote_num_tokens"], len(sequence.tokens) - 1)

    def _say(self, sequence: Sequence, width: int) -> EngineCoreOutput:
        params, num_said = sequence.params, len(sequence.said)
        token, drawn = next_token(sequence.tokens, params, sequence.num_before + num_said, sequence.lora)
        if params.allowed_token_ids is not None:
            token = params.allowed_token_ids[drawn % len(params.allowed_token_ids)]
        while num_said < params.min_tokens and token in params._all_stop_token_ids:
            token = (token + 1) % VOCAB_SIZE
        sequence.tokens.append(token)
        sequence.said.append(token)
        output = EngineCoreOutput(sequence.request.request_id, [token])
        output.prefill_stats, sequence.stats = sequence.stats, None
        if params.logprobs is not None:
            output.new_logprobs = logprobs_of([logprob_row(token, drawn, width)])
        if params.prompt_logprobs is not None and not num_said:
            rest = sequence.request.prompt_token_ids[1:]
            rows = [logprob_row(each, each, params.prompt_logprobs) for each in rest]
            output.new_prompt_logprobs_tensors = logprobs_of(rows)
        self._end(sequence, token, output)
        return output

    def _end(self, sequence: Sequence, token: int, output: EngineCoreOutput) -> None:
        params = sequence.params
        if self.gives_up is not None:
            output.finish_reason, self.gives_up = self.gives_up, None
        elif token == params._eos_token_id:
            output.finish_reason = FinishReason.STOP
        elif token in params.stop_token_ids:
            output.finish_reason, output.stop_reason = FinishReason.STOP, token
        elif len(sequence.said) >= params.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is None:
            return
        self.running.remove(sequence)
        transfer = self.config.kv_transfer_config
        is_kept = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if transfer is None or not sequence.transfer.get("do_remote_decode") or not is_kept:
            self.pool.let_go(sequence)
            return
        name = sequence.request.request_id
        self.held[name] = sequence
        lease_s = transfer.kv_connector_extra_config["kv_lease_duration"]
        asyncio.get_running_loop().call_later(lease_s, self._release, name)
        output.kv_transfer_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(len(sequence.blocks)))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": self.side_channel_port,
            "tp_size": 1,
            "remote_num_tokens": sequence.num_computed,
            "kvolt_hold_s": sequence.transfer["kvolt_hold_s"],
        }
