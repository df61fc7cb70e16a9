"""ModelRunner: a StepPlan in, logits out.

Owns the way from the scheduler's sequences to the model's tensors: the batch, which rows need logits, replay of
captured decode steps. Decides nothing about tokens: `core` samples.
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
"""Rows of prompt logits at a time: a vocabulary wide each, they would outgrow everything else."""


class Replay(Protocol):
    """Captured decode steps, see graphs.DecodeGraphs."""

    def covers(self, batch: Batch) -> bool: ...

    def replay(self, batch: Batch) -> Tensor: ...


class Computed(NamedTuple):
    """What a step gives."""

    logits: Tensor
    """[works that sample, vocabulary], in plan order."""
    hidden: Tensor | None
    """[tokens, hidden]; None for a replayed step."""
    query_starts: list[int]


class ModelRunner:
    """One rank's model, its slab and its attention."""

    def __init__(self, model: Transformer, attention: Attention, slab: KvSlab, device: torch.device) -> None:
        self.model = model
        self.slab = slab
        self.device = device
        self._attention = attention
        self._batches = BatchBuilder(slab.shape.block_size, device)
        self._replay: Replay | None = None
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        """Told of every batch before it runs: how other ranks follow."""

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
        wanted = hidden if is_every_row else hidden[batch.logit_rows]
        return Computed(self.model.logits(wanted), hidden, batch.query_starts)

    def forward(self, batch: Batch) -> Tensor:
        self.on_batch(batch)
        return self.model.forward(batch, self._attention)

    def wait(self) -> None:
        """Until all that was computed lies in the slab: a chunk that samples nothing has not been waited for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """A short prompt into blocks that nobody holds yet: kernels compile, libraries take their workspaces."""
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
        """What a captured step computes."""
        return self.model.logits(self.forward(batch))

    @torch.inference_mode()
    def each_prompt_logits(self, computed: Computed, number: int, work: Work, count: int) -> Sequence[Tensor]:
        """Logits of the first `count` tokens of a chunk, in slices; `number`: its place in the plan."""
        assert computed.hidden is not None, "a step with a prompt is not replayed"
        first = computed.query_starts[number]
        rows = computed.hidden[first : first + count]
        starts = range(0, count, _MAX_LOGIT_ROWS)
        return [self.model.logits(rows[start : start + _MAX_LOGIT_ROWS]) for start in starts]
