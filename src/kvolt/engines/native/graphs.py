"""CUDA graphs of decode steps: replaces a few hundred kernel launches by one.

Owns the static inputs of the graphs, the padding to a captured size, and the replay. A graph uses the same addresses
every time: a batch is copied into the static tensors; padding rows write their KV to a spare slot and have a context
of 0. Must not know models: it captures any `forward(batch) -> [rows, ...]`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvolt.engines.native.batch import Batch

Forward = Callable[[Batch], Tensor]
Run = Callable[[], Tensor]
Recorder = Callable[[Run], Run]
"""Runs a function once, and returns one that repeats it on the same memory."""

DEFAULT_SIZES = (1, 2, 4, 8, *range(16, 257, 8))


def sizes_up_to(max_rows: int) -> list[int]:
    """The default sizes up to `max_rows`, and `max_rows` itself, so that the largest batch has a graph too."""
    largest = min(max_rows, DEFAULT_SIZES[-1])
    return [*(size for size in DEFAULT_SIZES if size < largest), largest]


class CudaRecorder:
    """Records CUDA graphs that share a memory pool, since only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        # First without capture: kernels are compiled, and libraries allocate their workspaces.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Limits of the captured graphs."""

    max_blocks: int
    """Width of the block tables, for the longest context."""
    spare_slot: int
    """Slot for the KV of padding rows, in a block that no sequence owns."""
    sizes: Sequence[int] = DEFAULT_SIZES
    """Batch sizes, ascending; a batch uses the smallest size that fits."""


class DecodeGraphs:
    """Replays decode steps for batches within the limits."""

    def __init__(
        self, forward: Forward, limits: GraphLimits, device: torch.device, recorder: Recorder | None = None
    ) -> None:
        self._forward = forward
        self._limits = limits
        self._sizes = sorted(limits.sizes)
        self._recorder = CudaRecorder() if recorder is None else recorder
        self._runs: dict[int, Run] = {}
        self._out: Tensor | None = None
        rows = self._sizes[-1]
        self._tokens, self._positions, self._slots, self._rows = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._rows.copy_(torch.arange(rows))
        self._lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros((rows, limits.max_blocks), dtype=torch.int32, device=device)

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    def capture(self) -> None:
        """Capture every size, the largest first, so that smaller ones reuse its memory."""
        self._pad(0, self._sizes[-1])
        for size in reversed(self._sizes):
            self._runs[size] = self._recorder(self._step_of(size))

    def covers(self, batch: Batch) -> bool:
        """Whether `replay` supports this batch: only decodes, no adapters, and within the captured sizes."""
        rows = len(batch.context_lens)
        return (
            bool(self._runs)
            and batch.num_decodes == rows
            and not batch.lora_rows
            and 0 < rows <= self._sizes[-1]
            and batch.block_tables.shape[1] <= self._limits.max_blocks
        )

    def replay(self, batch: Batch) -> Tensor:
        """The result of `forward` for a covered batch, which may be on the host or the device. Valid until
        the next replay."""
        rows = batch.num_decodes
        size = self._sizes[bisect_left(self._sizes, rows)]
        self._tokens[:rows].copy_(batch.token_ids, non_blocking=True)
        self._positions[:rows].copy_(batch.positions, non_blocking=True)
        self._slots[:rows].copy_(batch.slots, non_blocking=True)
        self._lens[:rows].copy_(batch.context_lens_t, non_blocking=True)
        self._tables[:rows, : batch.block_tables.shape[1]].copy_(batch.block_tables, non_blocking=True)
        if rows < size:
            self._pad(rows, size)
        return self._runs[size]()[:rows]

    def _pad(self, rows: int, size: int) -> None:
        # Tokens and positions of an earlier batch may remain: the result is not read.
        self._slots[rows:size].fill_(self._limits.spare_slot)
        self._lens[rows:size].zero_()

    def _step_of(self, size: int) -> Run:
        batch = Batch(
            token_ids=self._tokens[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            num_decodes=size,
            query_starts=list(range(size + 1)),
            context_lens=[0] * size,  # the kernels read the tensor
            context_lens_t=self._lens[:size],
            block_tables=self._tables[:size],
            logit_rows=self._rows[:size],
        )

        def step() -> Tensor:
            result = self._forward(batch)
            # One output for all sizes: otherwise each graph would keep a [size, vocabulary] tensor.
            if self._out is None:
                self._out = torch.empty(
                    (self._sizes[-1], *result.shape[1:]), dtype=result.dtype, device=result.device
                )
            self._out[:size].copy_(result)
            return self._out[:size]

        return step
