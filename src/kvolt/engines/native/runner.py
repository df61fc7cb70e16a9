"""ModelRunner: computes the logits of a StepPlan.

Builds the batch from the scheduler's sequences, selects the rows that need logits, and replays captured
decode steps. Sampling is done by `core`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.batch import Batch, BatchBuilder
from kvolt.engines.native.graphs import DecodeGraphs
from kvolt.engines.native.model.attention_cpu import CpuAttention
from kvolt.engines.native.model.transformer import Attention, LoadOptions, Transformer
from kvolt.engines.native.parallel import RankGroup
from kvolt.engines.native.setup import Setup
from kvolt.engines.native.slab import DTYPES, KvSlab, SlabShape
from kvolt.models.checkpoint import Checkpoint
from kvolt.models.config import ModelConfig
from kvolt.runtime.host.cores import usable_cores
from kvolt.scheduler.step_plan import StepPlan, Work

_WARM_UP_TOKENS = 64
_MAX_LOGIT_ROWS = 256
"""Prompt logits are computed in slices of this many rows: each row is as wide as the vocabulary."""


class Computed(NamedTuple):
    """Result of a step."""

    logits: Tensor
    """[works that sample, vocabulary], in plan order."""
    hidden: Tensor | None
    """[tokens, hidden]; None for a replayed step."""
    query_starts: list[int]


class ModelRunner:
    """Model, slab and attention backend of one rank."""

    def __init__(self, model: Transformer, attention: Attention, slab: KvSlab, device: torch.device) -> None:
        self.model = model
        self.slab = slab
        self.device = device
        self._attention = attention
        self._batches = BatchBuilder(slab.shape.block_size, device)
        self.graphs: DecodeGraphs | None = None
        """Captured decode steps."""
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        """Called with every batch before it runs; broadcasts it to the other ranks."""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Computed:
        rows = list(range(len(plan.decodes)))
        row = len(rows)
        for work in plan.prefills:
            row += work.num_tokens
            if work.samples:
                rows.append(row - 1)
        batch = self._batches.build(plan, rows)
        if self.graphs is not None and self.graphs.covers(batch):
            return Computed(self.graphs.replay(batch), None, batch.query_starts)
        hidden = self.forward(batch)
        is_every_row = len(rows) == batch.num_tokens
        selected = hidden if is_every_row else hidden[batch.logit_rows]
        return Computed(self.model.logits(selected), hidden, batch.query_starts)

    def forward(self, batch: Batch) -> Tensor:
        self.on_batch(batch)
        return self.model.forward(batch, self._attention)

    def forward_chunk(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> Tensor:
        """Hidden states of tokens of one sequence, from position `start` on."""
        return self.forward(self._batches.chunk(tokens, start, blocks))

    def wait(self) -> None:
        """Wait until all KV is written: steps that sample nothing are not synchronised otherwise."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a short prompt in free blocks, so that kernels are compiled and libraries allocate their
        workspaces."""
        shape = self.slab.shape
        length = min(_WARM_UP_TOKENS, shape.num_blocks * shape.block_size, self.model.config.context_length)
        blocks = range(-(-length // shape.block_size))
        self.model.logits(self.forward_chunk([0] * length, 0, blocks)[-1:])

    def decode_logits(self, batch: Batch) -> Tensor:
        """The function captured by graphs."""
        return self.model.logits(self.forward(batch))

    @torch.inference_mode()
    def each_prompt_logits(self, computed: Computed, number: int, work: Work, count: int) -> Sequence[Tensor]:
        """Logits of the first `count` tokens of a chunk, in slices. `number`: index of the chunk in the plan."""
        assert computed.hidden is not None, "a step with a prompt is not replayed"
        first = computed.query_starts[number]
        rows = computed.hidden[first : first + count]
        starts = range(0, count, _MAX_LOGIT_ROWS)
        return [self.model.logits(rows[start : start + _MAX_LOGIT_ROWS]) for start in starts]


def rank_runner(
    checkpoint: Checkpoint,
    arguments: NativeArguments,
    setup: Setup,
    group: RankGroup,
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
    usable = min(torch.get_num_threads(), len(usable_cores()))
    torch.set_num_threads(arguments.threads or max(1, usable // arguments.tensor_parallel))


def slab_in(memory: int | None, shape: SlabShape, setup: Setup) -> KvSlab:
    """A slab in the memory of a descriptor, which is closed once it is mapped; None: newly allocated."""
    try:
        return KvSlab(shape, str(setup.device), memory)
    finally:
        if memory is not None:
            os.close(memory)


def attention_backend(slab: KvSlab, config: ModelConfig, device: torch.device, group: RankGroup) -> Attention:
    scale = config.head_dim**-0.5
    if device.type == "cuda":
        from kvolt.engines.native.model.attention_cuda import CudaAttention

        return CudaAttention(slab, scale)
    return CpuAttention(slab, config.num_heads // group.degree, scale)
