"""Batch: the input tensors of one step.

Flat: one row per token, decoding sequences first, then prefill chunks. Built on the host and copied to the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvolt.engines.native.sampling.draw import to_device
from kvolt.scheduler.sequence import Sequence
from kvolt.scheduler.step_plan import StepPlan, Work

_SPARE_BLOCKS = 8


@dataclass(slots=True)
class Batch:
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    """Slot of each token's KV: block * block_size + offset."""
    num_decodes: int
    """Leading sequences with one token each."""
    query_starts: list[int]
    context_lens: list[int]
    """KV length per sequence, including this step's tokens."""
    context_lens_t: torch.Tensor
    block_tables: torch.Tensor
    """[sequences, blocks of the longest]; entries beyond a sequence's own blocks are never read."""
    logit_rows: torch.Tensor
    """Rows of the hidden states that need logits."""
    lora_rows: list[tuple[str, int, int]] = field(default_factory=list)
    """Adapters and the rows [from, to) they apply to; rows without an adapter are omitted."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)


class BatchBuilder:
    """Builds batches of one engine.

    A batch of decodes that follows one of the same sequences (the usual case) is derived from it
    incrementally; only new blocks are visited per sequence.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._decoding: list[Sequence] = []
        """Sequences of the last batch if it only had decodes; `_positions` and `_tables` belong to them."""
        self._positions = np.empty(0, dtype=np.int64)
        self._tables = np.empty((0, 0), dtype=np.int32)

    def build(self, plan: StepPlan, logit_rows: Seq[int]) -> Batch:
        decoding = [work.sequence for work in plan.decodes]
        if plan.prefills:
            self._decoding = []
            return self._assemble([*plan.decodes, *plan.prefills], len(decoding), logit_rows)
        starts = np.fromiter((work.start for work in plan.decodes), dtype=np.int64, count=len(decoding))
        if decoding != self._decoding or not np.array_equal(starts, self._positions + 1):
            self._reset_tables(decoding, int(starts.max()))
        self._positions = starts
        self._add_blocks(decoding, starts)
        rows = np.arange(len(decoding))
        blocks = self._tables[rows, starts // self._block_size].astype(np.int64)
        width = int(starts.max()) // self._block_size + 1
        return self._batch(
            np.fromiter((sequence.tokens[-1] for sequence in decoding), dtype=np.int64, count=len(decoding)),
            starts,
            blocks * self._block_size + starts % self._block_size,
            self._tables[:, :width].copy(),
            list(range(len(decoding) + 1)),
            (starts + 1).tolist(),
            len(decoding),
            rows,
            _lora_rows(plan.decodes, range(len(decoding) + 1)),
        )

    def chunk(self, tokens: Seq[int], start: int, blocks: Seq[int]) -> Batch:
        """Tokens of one sequence from position `start` on. None needs logits."""
        end = start + len(tokens)
        positions = np.arange(start, end, dtype=np.int64)
        table = np.array(blocks, dtype=np.int32)
        return self._batch(
            np.array(tokens, dtype=np.int64),
            positions,
            self._slots(table, positions),
            table[None],
            [0, len(tokens)],
            [end],
            0,
            np.empty(0, dtype=np.int64),
            [],
        )

    def _slots(self, table: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slots of positions of one sequence, whose blocks are `table`."""
        slots: npt.NDArray[np.int64] = table[positions // self._block_size].astype(np.int64)
        return slots * self._block_size + positions % self._block_size

    def _reset_tables(self, decoding: list[Sequence], last: int) -> None:
        """Rebuild the tables for a different set of sequences, with some spare columns."""
        self._decoding = decoding
        width = last // self._block_size + 1 + _SPARE_BLOCKS
        self._tables = np.zeros((len(decoding), width), dtype=np.int32)
        for row, sequence in enumerate(decoding):
            self._tables[row, : len(sequence.blocks)] = sequence.blocks[:width]

    def _add_blocks(self, decoding: list[Sequence], starts: npt.NDArray[np.int64]) -> None:
        """Add the blocks that begin at these positions."""
        fresh = np.flatnonzero(starts % self._block_size == 0)
        if not len(fresh):
            return
        num_columns = int(starts.max()) // self._block_size + 1
        if num_columns > self._tables.shape[1]:
            self._tables = np.pad(
                self._tables, ((0, 0), (0, num_columns + _SPARE_BLOCKS - self._tables.shape[1]))
            )
        for row in fresh.tolist():
            column = int(starts[row]) // self._block_size
            self._tables[row, column] = decoding[row].blocks[column]

    def _assemble(self, works: list[Work], num_decodes: int, logit_rows: Seq[int]) -> Batch:
        """Build any batch without using the previous one."""
        block_size = self._block_size
        query_starts = [0] * (len(works) + 1)
        context_lens = [0] * len(works)
        token_ids: list[int] = []
        for number, work in enumerate(works):
            end = work.start + work.num_tokens
            token_ids += work.sequence.tokens[work.start : end]
            query_starts[number + 1] = query_starts[number] + work.num_tokens
            context_lens[number] = end
        tables = np.zeros((len(works), -(-max(context_lens) // block_size)), dtype=np.int32)
        positions = np.empty(len(token_ids), dtype=np.int64)
        slots = np.empty(len(token_ids), dtype=np.int64)
        for number, work in enumerate(works):
            end = context_lens[number]
            count = -(-end // block_size)
            tables[number, :count] = work.sequence.blocks[:count]
            rows = slice(query_starts[number], query_starts[number + 1])
            steps = np.arange(work.start, end, dtype=np.int64)
            positions[rows] = steps
            slots[rows] = self._slots(tables[number], steps)
        return self._batch(
            np.array(token_ids, dtype=np.int64),
            positions,
            slots,
            tables,
            query_starts,
            context_lens,
            num_decodes,
            np.array(logit_rows, dtype=np.int64),
            _lora_rows(works, query_starts),
        )

    def _batch(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        tables: npt.NDArray[np.int32],
        query_starts: list[int],
        context_lens: list[int],
        num_decodes: int,
        logit_rows: npt.NDArray[np.int64],
        lora_rows: list[tuple[str, int, int]],
    ) -> Batch:
        device = self._device
        return Batch(
            token_ids=to_device(token_ids, device),
            positions=to_device(positions, device),
            slots=to_device(slots, device),
            num_decodes=num_decodes,
            query_starts=query_starts,
            context_lens=context_lens,
            context_lens_t=to_device(np.array(context_lens, dtype=np.int32), device),
            block_tables=to_device(tables, device),
            logit_rows=to_device(logit_rows, device),
            lora_rows=lora_rows,
        )


def _lora_rows(works: Seq[Work], query_starts: Seq[int]) -> list[tuple[str, int, int]]:
    return [
        (work.sequence.request.lora, query_starts[number], query_starts[number + 1])
        for number, work in enumerate(works)
        if work.sequence.request.lora
    ]
