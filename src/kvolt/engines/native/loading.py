"""Loads a model and builds an EngineCore.

Owns the assembly of the engine's parts and the number of KV blocks. Logs its progress, since loading may take minutes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.card import Capacity, EngineInfo, card_hash
from kvolt.core.errors import ConfigError
from kvolt.core.load import StepLogHeader, StepStats, encode_step, encode_step_log
from kvolt.core.request import Request
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.model.transformer import LoadOptions, Transformer
from kvolt.engines.native.parallel import RankGroup, Solo, TorchGroup, check_degree
from kvolt.engines.native.runner import ModelRunner, attention_backend, set_threads, slab_in
from kvolt.engines.native.setup import Setup, choose_setup, device_of, largest_step_bytes, memory_for_kv
from kvolt.engines.native.slab import DTYPES, LAYOUT, KvSlab, SlabShape
from kvolt.engines.native.step_trials import Trials
from kvolt.engines.native.tp_rank import LoadLora, TpRanks, UnloadLora
from kvolt.engines.native.trial_runner import run_trials
from kvolt.kv import BlockPool
from kvolt.models.checkpoint import Checkpoint, model_card, open_checkpoint
from kvolt.models.config import ModelConfig
from kvolt.models.fetch_progress import ProgressLog
from kvolt.models.resolve import resolve
from kvolt.runtime.clock import Clock, SystemClock
from kvolt.runtime.host.cores import usable_cores
from kvolt.runtime.host.turns import host_turn
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.step_pace import StepPace
from kvolt.scheduler.step_plan import Limits

if TYPE_CHECKING:
    from kvolt.engines.native.grammar.compiler import GrammarCompiler

log = logging.getLogger(__name__)

_PROGRESS_S = 10.0
FEATURES = ("KvEvents", "KvVisible", "KvMovable", "KvAddressable", "KvTierable", "Prefill", "Lora", "Embed")
_OF_WHOLE_BLOCKS = ("KvMovable", "KvAddressable", "KvTierable", "Prefill")
_WITHOUT_WHOLE_BLOCKS = tuple(name for name in FEATURES if name not in _OF_WHOLE_BLOCKS)
"""Features if a rank's blocks have only its share of the heads, and the others' blocks cannot be accessed."""


KvMemory = Callable[[int, int], int | None]
"""Maps a rank and a size in bytes to a descriptor of host memory for its KV slab, which loading closes; None
to allocate it here."""


def _own_memory(rank: int, num_bytes: int) -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class CoreHooks:
    """Dependencies of loading, provided by the caller."""

    memory: KvMemory = _own_memory
    clock: Clock = field(default_factory=SystemClock)
    turn: Callable[[Sequence[str]], AbstractContextManager[None]] = host_turn
    """Exclusive use of the named cores or devices while steps are measured."""


def load_core(spec: EngineSpec, arguments: NativeArguments, memory: KvMemory = _own_memory) -> EngineCore:
    """Load a model and build its core. ConfigError if it cannot be found, read or run here."""
    hooks = CoreHooks(memory)
    path = Path(resolve(spec.model, ProgressLog()).path)
    checkpoint = open_checkpoint(path, arguments.context_length)
    name = arguments.served_name or spec.model
    if arguments.tensor_parallel == 1:
        return build_core(spec, name, checkpoint, arguments, hooks)
    check_degree(checkpoint.config, arguments.tensor_parallel)
    for rank in range(arguments.tensor_parallel):
        device_of(spec, arguments, rank)
    device = choose_setup(spec, arguments, checkpoint.config).device
    with ExitStack() as undo:
        tp_ranks = TpRanks(spec, arguments, path)
        undo.callback(tp_ranks.close)
        tp_ranks.wait_started()
        group = TorchGroup(0, arguments.tensor_parallel, tp_ranks.address, device)
        undo.callback(group.close)
        core = build_core(spec, name, checkpoint, arguments, hooks, group, tp_ranks)
        core.closing.push(undo.pop_all())
    return core


def build_core(
    spec: EngineSpec,
    name: str,
    checkpoint: Checkpoint,
    arguments: NativeArguments,
    hooks: CoreHooks,
    group: RankGroup | None = None,
    tp_ranks: TpRanks | None = None,
) -> EngineCore:
    """Build a core from any checkpoint."""
    group = group or Solo()
    config = checkpoint.config
    setup = choose_setup(spec, arguments, config, group.rank)
    set_threads(arguments)
    started = hooks.clock.monotonic()
    log.debug("loading %s: %d layers in %s on %s", name, config.num_layers, setup.dtype, setup.device)
    options = LoadOptions(DTYPES[setup.dtype], setup.device, arguments.quantize)
    model = Transformer(checkpoint, options, group, _layer_progress(name, hooks.clock))
    slab = _slab(config, setup, arguments, hooks.memory, group)
    has_blocks = tp_ranks is None or _allocate_others(tp_ranks, slab, group.degree, setup, hooks.memory)
    num_blocks = slab.shape.num_blocks - 1  # the last one receives the KV of padding rows in captured steps
    runner = ModelRunner(model, attention_backend(slab, config, setup.device, group), slab, setup.device)
    for adapter, folder in arguments.loras.items():
        model.adapters.load(adapter, Path(folder))
    if tp_ranks is not None:
        runner.on_batch = tp_ranks.run
        model.adapters.on_load = lambda name, folder: tp_ranks.send(LoadLora(name, str(folder)))
        model.adapters.on_unload = lambda name: tp_ranks.send(UnloadLora(name))
    card = model_card(name, checkpoint, setup.block_size)
    info = EngineInfo(
        engine="native",
        role=spec.role,
        model=card.name,
        card=card_hash(card),
        block_size=setup.block_size,
        capacity=Capacity(
            max_num_seqs=setup.max_num_seqs,
            max_batch_tokens=setup.max_batch_tokens,
            kv_total_blocks=num_blocks,
        ),
        kv_layout=LAYOUT,
        features=FEATURES if has_blocks else _WITHOUT_WHOLE_BLOCKS,
        kv_events=arguments.kv_events,
        loras=model.adapters.names,
    )
    keys = BlockKeyContext(
        weights_hash=f"{checkpoint.weights_hash}/{arguments.quantize}",
        dtype=setup.dtype,
        block_size=setup.block_size,
        layout=LAYOUT,
    )

    def keys_of(request: Request) -> BlockKeyContext:
        if not request.lora and not request.salt:
            return keys
        lora = model.adapters.digest(request.lora) if request.lora else None
        return msgspec.structs.replace(keys, lora=lora, salt=request.salt)

    def grammars() -> GrammarCompiler:
        from kvolt.engines.native.grammar.compiler import (
            GrammarCompiler,  # imported on first use: takes seconds
        )

        return GrammarCompiler(checkpoint.tokenizer_json, config.vocab_size, card.eos_token_ids)

    limits = Limits(
        max_num_seqs=setup.max_num_seqs,
        max_batch_tokens=setup.max_batch_tokens,
        # Requests that will run at once wait too, until the first step.
        max_waiting=arguments.max_waiting + setup.max_num_seqs,
        context_length=config.context_length,
        block_size=setup.block_size,
    )
    scheduler = Scheduler(BlockPool(num_blocks, arguments.kv_events), limits, card.eos_token_ids, keys_of)
    core = EngineCore(
        card,
        info,
        scheduler,
        runner,
        has_blocks,
        grammars,
        keys_of,
        hooks.clock,
    )
    log.debug("running a first step")
    runner.warm_up()
    if setup.device.type == "cuda" and arguments.cuda_graphs and group.degree == 1:
        log.debug("capturing CUDA graphs of decode steps")
        _capture(runner, setup, config)
    if arguments.measure_steps:
        log.debug("measuring steps")
        try:
            with hooks.turn(_measured_resources(setup.device)):
                trials = run_trials(runner, limits, num_blocks, hooks.clock.monotonic)
        except Exception:  # the engine works without a latency model; routers use estimates
            log.warning("step calibration failed; no latency model will be published", exc_info=True)
        else:
            _set_latency(core, trials)
    if arguments.step_log is not None:
        core.on_step = _step_log(Path(arguments.step_log), core, setup)
    log.debug("loaded %s in %.1f s with %d KV blocks", name, hooks.clock.monotonic() - started, num_blocks)
    return core


def _set_latency(core: EngineCore, trials: Trials) -> None:
    latency = trials.rough_latency
    if latency is not None:
        core.info = msgspec.structs.replace(
            core.info, latency=latency, has_estimated_latency=trials.latency is None
        )
        core.scheduler.planner.pace = StepPace(latency, trials.most_prompt_tokens)


def _measured_resources(device: torch.device) -> list[str]:
    """Names of the GPU or the cores that steps use, which no other engine may measure on at the same time."""
    if device.type == "cuda":
        return [f"gpu-{torch.cuda.get_device_properties(device).uuid}"]
    return [f"core-{core}" for core in usable_cores()]


def _slab(
    config: ModelConfig, setup: Setup, arguments: NativeArguments, memory: KvMemory, group: RankGroup
) -> KvSlab:
    one = SlabShape.of(config, 1, setup.block_size, setup.dtype, group.degree)
    count = arguments.kv_blocks
    if count is None and arguments.kv_memory_gib is not None:
        count = int(arguments.kv_memory_gib * 1024**3) // one.block_bytes
    if count is None:
        itemsize = DTYPES[setup.dtype].itemsize
        step_bytes = largest_step_bytes(
            config, setup.max_batch_tokens, setup.max_num_seqs, itemsize, group.degree
        )
        count = memory_for_kv(setup.device, step_bytes) // one.block_bytes
    least = -(-config.context_length // setup.block_size)
    if count < 1:
        raise ConfigError(
            f"no memory is left for KV blocks of {one.block_bytes} bytes",
            key="args.kv_memory_gib",
            remedy="raise kv_memory_gib, or choose a smaller model",
        )
    if count < least:
        log.info("the %d KV blocks cannot hold a full context of %d tokens", count, config.context_length)
    shape = msgspec.structs.replace(one, num_blocks=count + 1)
    descriptor = None if setup.device.type == "cuda" else memory(group.rank, shape.num_bytes)
    return slab_in(descriptor, shape, setup)


def _allocate_others(tp_ranks: TpRanks, slab: KvSlab, degree: int, setup: Setup, memory: KvMemory) -> bool:
    """Allocate the other ranks' blocks. Returns whether other processes can access them."""
    ranks = () if setup.device.type == "cuda" else range(1, degree)
    allocated = (memory(rank, slab.shape.num_bytes) for rank in ranks)
    descriptors = [each for each in allocated if each is not None]
    tp_ranks.allocate(slab.shape.num_blocks, descriptors)
    for each in descriptors:
        os.close(each)
    return bool(descriptors)


def _capture(runner: ModelRunner, setup: Setup, config: ModelConfig) -> None:
    from kvolt.engines.native.graphs import DecodeGraphs, GraphLimits, sizes_up_to

    shape = runner.slab.shape
    limits = GraphLimits(
        max_blocks=-(-config.context_length // shape.block_size),
        spare_slot=(shape.num_blocks - 1) * shape.block_size,
        sizes=sizes_up_to(setup.max_num_seqs),
    )
    graphs = DecodeGraphs(runner.decode_logits, limits, setup.device)
    with torch.inference_mode():
        graphs.capture()
    runner.graphs = graphs


def _step_log(path: Path, core: EngineCore, setup: Setup) -> Callable[[StepStats], None]:
    """A writer of the step log, which flushes every step."""
    out = core.closing.enter_context(path.open("ab", buffering=0))
    if out.tell() == 0:
        header = StepLogHeader(
            engine="native",
            model=core.card.name,
            device=_device_name(setup.device),
            block_size=setup.block_size,
            dtype=setup.dtype,
        )
        out.write(b"".join(encode_step_log(header, ())))

    def write(stats: StepStats) -> None:
        out.write(encode_step(stats))

    return write


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _layer_progress(name: str, clock: Clock) -> Callable[[int, int], None]:
    reported_at = clock.monotonic()

    def layer(done: int, total: int) -> None:
        nonlocal reported_at
        if clock.monotonic() - reported_at > _PROGRESS_S:
            reported_at = clock.monotonic()
            log.info("loading %s: %d of %d layers", name, done, total)

    return layer
