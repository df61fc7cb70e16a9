"""A core without torch for tests of what is around it: a real scheduler and pool, and a model that is a hash.

The KV of a token is a hash of the KV before it and of the token, kept in the memory that the shell gave; the next
token is a hash of the last KV. So a lost, mixed up or half moved block gives other tokens. `load_*` are what the
shell can be told to load; `Request.extra["fault"]` makes one request go wrong in a named way.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from kvolt.core.block_key import BlockKeyContext, KvLayout
from kvolt.core.card import Capacity, EngineInfo, card_hash
from kvolt.core.delta import Delta, StepOutput, TokenLogprobs, Usage
from kvolt.core.errors import ConfigError, InvalidRequest, NotFound, Unsupported
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import Stored
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.core.request import Request, Role
from kvolt.engines.contract import AttachedKv, EngineSpec, HeldKv, KvAllocation, SealedKv
from kvolt.engines.kv_exchange import KvExchange
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.prefills import OnBlocks, OnHandoff, Prefills
from kvolt.engines.sim.model import sim_card
from kvolt.kv import BlockId, BlockPool
from kvolt.scheduler.scheduler import Limits, NewToken, Scheduler, Work
from kvolt.transfer.memory.device_memory import DeviceHandle

KvMemory = Callable[[int, int], int]
VOCABULARY = 1000
NUM_OUTPUT_TOKENS = 48
"""The model generates tokens below this, EOS (2) among them."""
STEP_S = 0.001
HOLD_S = 2.0
"""Short enough to wait for, longer than a busy machine takes to fill the pool."""
_STATE = struct.Struct("<Q")

log = logging.getLogger(__name__)


class FakeCore:
    def __init__(self, spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> None:
        block_size = arguments.block_size
        num_blocks = arguments.kv_blocks or 256
        self.card = sim_card(spec.model, arguments.context_length or 256, block_size)
        limits = Limits(
            max_num_seqs=arguments.max_num_seqs or 16,
            max_batch_tokens=arguments.max_batch_tokens or 64,
            max_waiting=arguments.max_waiting + (arguments.max_num_seqs or 16),
            context_length=self.card.context_length,
            block_size=block_size,
        )
        self.info = EngineInfo(
            engine="native",
            role=spec.role,
            model=self.card.name,
            card=card_hash(self.card),
            block_size=block_size,
            capacity=Capacity(
                max_num_seqs=limits.max_num_seqs,
                max_batch_tokens=limits.max_batch_tokens,
                kv_total_blocks=num_blocks,
            ),
            kv_layout="fake",
        )
        self.scheduler = Scheduler(BlockPool(num_blocks), limits, self.card.eos_token_ids, self.keys_of)
        self.runner = SimpleNamespace(
            model=SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY)),
            slab=SimpleNamespace(device_handle=lambda: None),
            device="cpu",
        )
        self.block_bytes = block_size * _STATE.size
        descriptor = memory(0, num_blocks * self.block_bytes)
        self.memory = mmap.mmap(descriptor, num_blocks * self.block_bytes)
        os.close(descriptor)
        self.capabilities = FakeCapabilities(self)
        self.step_s = STEP_S
        self._faults: dict[RequestId, str] = {}

    def keys_of(self, request: Request) -> BlockKeyContext:
        return BlockKeyContext(
            weights_hash="fake",
            dtype="u8",
            block_size=self.card.block_size,
            layout="fake",
            lora=self.capabilities.adapters[request.lora] if request.lora else None,
            salt=request.salt,
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: Request, keep_blocks: bool = False) -> None:
        fault = request.extra.get("fault")
        if fault == "refuse":
            raise Unsupported("refused as told", feature="fault")
        if fault == "trip":
            raise RuntimeError("tripped as told")
        if fault == "log":
            log.warning("logged as told")
        if fault is not None:
            self._faults[request.request_id] = fault
        self.scheduler.add_request(request, keep_blocks=keep_blocks)

    def abort(self, request_id: RequestId) -> None:
        self.scheduler.abort(request_id)

    def withdraw(self, request_id: RequestId) -> bool:
        return self.scheduler.withdraw(request_id)

    def load(self) -> WorkerLoad:
        scheduler = self.scheduler
        return WorkerLoad(
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.pool.num_used,
            scheduler.pool.num_blocks,
        )

    def close(self) -> None:
        self.memory.close()

    def step(self) -> StepOutput | None:
        self.capabilities.prefills.expire()
        plan = self.scheduler.plan()
        self.capabilities.prefills.notify_watchers()
        if plan is None:
            changes = self.scheduler.take_changes()
            return StepOutput(load=self.load(), kv_changes=changes) if changes else None
        works = [*plan.decodes, *plan.prefills]
        for work in works:
            self._suffer(work.sequence.request)
        time.sleep(self.step_s)
        states = [self._compute(work) for work in works]
        sampled = [
            self._next_token(work, state) for work, state in zip(works, states, strict=True) if work.samples
        ]
        new_tokens = self.scheduler.commit(plan, sampled)
        emitted = [new for new in new_tokens if not self.capabilities.prefills.consume_token(new)]
        self.capabilities.prefills.notify_watchers()
        plain = [new for new in emitted if _is_plain(new)]
        return StepOutput(
            deltas=tuple(
                (new.sequence.request.request_id, _delta(new)) for new in emitted if not _is_plain(new)
            ),
            load=replace(self.load(), step=replace(plan.stats, time_s=self.step_s)),
            plain_ids=tuple(new.sequence.request.request_id for new in plain),
            plain_tokens=tuple(new.token for new in plain),
            kv_changes=self.scheduler.take_changes(),
        )

    def _suffer(self, request: Request) -> None:
        match self._faults.get(request.request_id):
            case "raise":
                raise RuntimeError("the step failed as told")
            case "exit":
                print("last words", file=sys.stderr, flush=True)
                os._exit(7)
            case "hang":
                time.sleep(60)

    # --- the model

    def _compute(self, work: Work) -> int:
        sequence = work.sequence
        state = self._state(sequence.blocks, work.start - 1) if work.start else _root(sequence.request)
        for position in range(work.start, work.start + work.num_tokens):
            state = xxh3_64_intdigest(struct.pack("<QI", state, sequence.tokens[position]))
            _STATE.pack_into(self.memory, self._place(sequence.blocks, position), state)
        return state

    def _next_token(self, work: Work, state: int) -> int:
        sequence = work.sequence
        seed = sequence.request.sampling.seed or 0
        return xxh3_64_intdigest(struct.pack("<QQI", state, seed, sequence.index)) % NUM_OUTPUT_TOKENS

    def _state(self, blocks: Sequence[BlockId], position: int) -> int:
        value: int = _STATE.unpack_from(self.memory, self._place(blocks, position))[0]
        return value

    def _place(self, blocks: Sequence[BlockId], position: int) -> int:
        block, offset = divmod(position, self.card.block_size)
        return blocks[block] * self.block_bytes + offset * _STATE.size

    # --- the memory of its blocks, for KvExchange


def _root(request: Request) -> int:
    return xxh3_64_intdigest((request.lora or "").encode())


def _is_plain(new: NewToken) -> bool:
    sampling = new.sequence.request.sampling
    return new.end is None and not new.is_first and sampling.num_choices == 1 and sampling.logprobs is None


def _logprobs(tokens: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...] | None:
    if num_top is None:
        return None
    return tuple(
        TokenLogprobs(token, -0.5, tuple((token + index, -0.5 - index) for index in range(num_top)))
        for token in tokens
    )


def _delta(new: NewToken) -> Delta:
    sequence, request = new.sequence, new.sequence.request
    is_first = new.is_first and not sequence.index
    of_prompt = None
    if is_first and not request.prior_tokens:
        of_prompt = _logprobs(request.token_ids[1:], request.sampling.prompt_logprobs)
    return Delta(
        token_ids=(new.token,),
        index=sequence.index,
        finish=new.end.finish if new.end else None,
        stop_reason=new.end.stop_reason if new.end else None,
        logprobs=_logprobs([new.token], request.sampling.logprobs),
        prompt_logprobs=None if of_prompt is None else (None, *of_prompt),
        cached_tokens=sequence.num_cached if is_first else None,
        usage=Usage(sequence.num_prompt, sequence.num_output) if new.end else None,
    )


class FakeCapabilities:
    def __init__(self, core: FakeCore) -> None:
        self._core = core
        self._exchange = KvExchange(core.scheduler)
        self.adapters: dict[str, str] = {}
        self.prefills = Prefills(core.scheduler, core.abort, time.monotonic, HOLD_S)

    # --- blocks

    def clear_kv(self) -> int:
        return self._core.scheduler.clear()

    def match(self, request: Request) -> int:
        return self._exchange.match(request)

    def kv_contents(self) -> tuple[Stored, ...]:
        return self._exchange.contents()

    def kv_layout(self) -> KvLayout:
        return KvLayout(
            name="fake",
            dtype="u8",
            num_layers=1,
            num_kv_heads=1,
            head_dim=_STATE.size,
            block_size=self._core.card.block_size,
            block_bytes=self._core.block_bytes,
        )

    def held_kv(self, request_id: RequestId) -> HeldKv:
        return self._exchange.held(request_id)

    def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        return self._exchange.allocate_kv(keys, hashes)

    def commit_kv(self, room: KvAllocation, num_filled: int, keep_for: RequestId | None) -> None:
        self._exchange.commit(room, num_filled, keep_for, self.prefills.expires_at)

    def attach_kv(self, room: KvAllocation, num_last: int, request_id: RequestId) -> AttachedKv:
        return self._exchange.attach(room, num_last, request_id)

    def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        found = self._exchange.pin_sealed(name, self.prefills.hold_s)
        if found:
            self.prefills.start_hold(name)
        return found

    # --- prompts for others

    def prefill(self, request: Request, on_handoff: OnHandoff) -> None:
        self.prefills.start(request, lambda short: self._core.submit(short, keep_blocks=True), on_handoff)

    def computed_kv(self, request_id: RequestId, after: int, on_blocks: OnBlocks) -> None:
        self.prefills.watch(request_id, after, on_blocks)

    def release_prefill(self, request_id: RequestId) -> None:
        self.prefills.release(request_id)

    # --- adapters, embeddings

    def load_lora(self, name: str, path: str) -> None:
        if path == "broken":
            raise InvalidRequest("it does not fit the model", param="path")
        self.adapters[name] = f"digest of {path}"

    def unload_lora(self, name: str) -> None:
        if name not in self.adapters:
            raise NotFound(f"no adapter {name}", kind="lora", name=name)
        del self.adapters[name]

    def loras(self) -> dict[str, str]:
        return dict(self.adapters)

    def embed(self, inputs: Sequence[Sequence[int]], pooling: str) -> list[list[float]]:
        if not all(inputs):
            raise InvalidRequest("an input is empty", param="input")
        if pooling == "last":
            raise ZeroDivisionError("a fault in the core")
        return [[1.0, float(len(tokens))] for tokens in inputs]


# --- what can be loaded


def load(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    log.info("loading")
    return FakeCore(spec, arguments, memory)


class MeasuredCore(FakeCore):
    """Registers steps of ten seconds and runs steps of a tenth."""

    def __init__(self, spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> None:
        super().__init__(spec, arguments, memory)
        self.info = replace(self.info, latency=LatencyModel(base_s=10.0))

    def step(self) -> StepOutput | None:
        output = super().step()
        if output is None or output.load is None:
            return output
        return replace(output, load=replace(output.load, step=StepStats(batch=1, time_s=0.1)))


def load_measured(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    return MeasuredCore(spec, arguments, memory)


def load_slowly(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    for number in range(40):
        log.info("layer %d of 40", number)
        time.sleep(0.01)
    return FakeCore(spec, arguments, memory)


def load_for_ever(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    log.info("pid %d", os.getpid())
    time.sleep(60)
    raise AssertionError


def load_two_ranks(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    """The memory of the second has its mark in it."""
    core = FakeCore(spec, arguments, memory)
    descriptor = memory(1, len(core.memory))
    os.pwrite(descriptor, b"rank 1", 0)
    os.close(descriptor)
    return core


def _load_on_device(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory, role: Role) -> FakeCore:
    """As if its blocks lay in a device's memory, which a worker of this role opens."""
    core = FakeCore(spec, arguments, memory)
    core.info = replace(core.info, role=role)
    core.runner.slab.device_handle = lambda: DeviceHandle(b"handle", 8, len(core.memory))
    core.runner.device = "cuda:1"
    return core


def load_decode_on_device(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    return _load_on_device(spec, arguments, memory, Role.DECODE)


def load_aggregated_on_device(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    return _load_on_device(spec, arguments, memory, Role.AGGREGATED)


def load_unknown(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    raise ConfigError(f"there is no model {spec.model!r}", key="model", remedy="name a folder")


def load_with_a_bug(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    raise ZeroDivisionError("a bug in loading")


def load_and_exit(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    print("out of something", file=sys.stderr, flush=True)
    os._exit(3)


def load_reporting_threads(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    """By what a library would read, which is not what Python read at its start."""
    found = subprocess.check_output(["sh", "-c", "echo OMP_NUM_THREADS=$OMP_NUM_THREADS"], text=True)
    log.info(found.strip())
    return FakeCore(spec, arguments, memory)


def load_reporting_collector(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory) -> FakeCore:
    log.info("collector while loading: %s", gc.isenabled())
    core = FakeCore(spec, arguments, memory)
    submit = core.submit

    def reporting(request: Request, keep_blocks: bool = False) -> None:
        log.info("collector while serving: %s, frozen: %s", gc.isenabled(), gc.get_freeze_count() > 0)
        submit(request, keep_blocks)

    core.submit = reporting  # type: ignore[method-assign]
    return core
