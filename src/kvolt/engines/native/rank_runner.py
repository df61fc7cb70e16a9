"""Builds the ModelRunner of one rank: weights, KV slab and attention backend."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.attention_cpu import CpuAttention
from kvolt.engines.native.model import Attention, LoadOptions, Transformer
from kvolt.engines.native.parallel import Group
from kvolt.engines.native.runner import ModelRunner
from kvolt.engines.native.setup import Setup
from kvolt.engines.native.slab import DTYPES, KvSlab, SlabShape
from kvolt.models.checkpoint import Checkpoint
from kvolt.models.config import ModelConfig
from kvolt.runtime.host.cores import usable_cores


def rank_runner(
    checkpoint: Checkpoint,
    arguments: NativeArguments,
    setup: Setup,
    group: Group,
    num_blocks: int,
    memory: int | None,
) -> ModelRunner:
    """The runner of a rank other than the first. Takes ownership of the descriptor `memory`."""
    set_threads(arguments)
    options = LoadOptions(DTYPES[setup.dtype], setup.device, arguments.quantize)
    model = Transformer(checkpoint, options, group)
    shape = SlabShape.of(checkpoint.config, num_blocks, setup.block_size, setup.dtype, group.degree)
    slab = slab_in(memory, shape, setup)
    for adapter, folder in arguments.loras.items():
        model.adapters.load(adapter, Path(folder))
    return ModelRunner(
        model, attention_backend(slab, checkpoint.config, setup.device, group), slab, setup.device
    )


def set_threads(arguments: NativeArguments) -> None:
    # torch counts the machine's cores; a container may have a smaller quota, and the ranks share it.
    usable = min(torch.get_num_threads(), len(usable_cores().ids))
    torch.set_num_threads(arguments.threads or max(1, usable // arguments.tensor_parallel))


def slab_in(memory: int | None, shape: SlabShape, setup: Setup) -> KvSlab:
    """A slab in the memory of a descriptor, which is closed once it is mapped; None: newly allocated."""
    try:
        return KvSlab(shape, str(setup.device), memory)
    finally:
        if memory is not None:
            os.close(memory)


def attention_backend(slab: KvSlab, config: ModelConfig, device: torch.device, group: Group) -> Attention:
    scale = config.head_dim**-0.5
    if device.type == "cuda":
        from kvolt.engines.native.attention_cuda import CudaAttention

        return CudaAttention(slab, scale)
    return CpuAttention(slab, config.num_heads // group.degree, scale)
