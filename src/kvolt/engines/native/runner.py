"""ModelRunner: computes the logits of a StepPlan.

Builds the batch from the scheduler's sequences, selects the rows that need logits, and replays captured
decode steps. Sampling is done by `core`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvolt.engines.native.batch import Batch, BatchBuilder
from kvolt.engines.native.model import Attention, Transformer
from kvolt.engines.native.slab import KvSlab
from kvolt.scheduler.step_plan import StepPlan, Work

_WARM_UP_TOKENS = 64
_MAX_LOGIT_ROWS = 256
"""Prompt logits are computed in slices of this many rows: each row is as wide as the vocabulary."""


class Replay(Protocol):
    """Captured decode steps; see graphs.DecodeGraphs."""

    def covers(self, batch: Batch) -> bool: ...

    def replay(self, batch: Batch) -> Tensor: ...


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
        self._replay: Replay | None = None
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        """Called with every batch before it runs; broadcasts it to the other ranks."""

    def use_replay(self, replay: Replay) -> None:
        self._replay = replay

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Computed:
        rows = list(range(len(plan.decodes)))
        row = len(rows)
        for work in plan.prefills:
            row += work.num_tokens
            if work.samples:
                rows.append(row - 1)
        batch = self._batches.build(plan, rows)
        if self._replay is not None and self._replay.covers(batch):
            return Computed(self._replay.replay(batch), None, batch.query_starts)
        hidden = self.forward(batch)
        is_every_row = len(rows) == batch.num_tokens
        selected = hidden if is_every_row else hidden[batch.logit_rows]
        return Computed(self.model.logits(selected), hidden, batch.query_starts)

    def forward(self, batch: Batch) -> Tensor:
        self.on_batch(batch)
        return self.model.forward(batch, self._attention)

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
        places = torch.arange(length, device=self.device)
        batch = Batch(
            token_ids=torch.zeros_like(places),
            positions=places,
            slots=places,
            num_decodes=0,
            query_starts=[0, length],
            context_lens=[length],
            context_lens_t=torch.tensor([length], dtype=torch.int32, device=self.device),
            block_tables=torch.arange(
                -(-length // shape.block_size), dtype=torch.int32, device=self.device
            ).unsqueeze(0),
            logit_rows=places[-1:],
        )
        self.model.logits(self.forward(batch)[batch.logit_rows])

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
