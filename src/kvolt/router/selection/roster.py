"""WorkerTable: the worker ranks that requests can be routed to, with their registered metadata. Pure.

Each worker rank is a row of WorkerLoads. Values that do not depend on the request are computed once per change of the
workers, as arrays over a set of candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvolt.core.card import EngineInfo
from kvolt.core.ids import InstanceId
from kvolt.core.latency import StepModel
from kvolt.router.policy.cost_model import CostModel, Floats
from kvolt.router.policy.load import Rows, WorkerLoads
from kvolt.router.selection.lookup import SlotLookups, as_slice
from kvolt.router.worker_rank import WorkerDpRank, ranks_of

_MAX_CANDIDATE_SETS = 64
"""Cached candidate sets: all workers, those with an adapter, those with a taint."""


@dataclass(slots=True)
class CandidateSet:
    """The candidates of a request; one element each in every array."""

    worker_ranks: tuple[WorkerDpRank, ...]
    index_of: Mapping[WorkerDpRank, int]
    rows: Rows
    row_selector: Rows | slice
    """`rows` for reading arrays: a slice if possible, which is much cheaper."""
    cost_model: CostModel
    total_blocks: Floats
    """0 if unknown."""
    max_seqs: Floats
    """Concurrent requests, and prompt tokens per step below; infinity if unknown."""
    max_batch_tokens: Floats
    taints: tuple[frozenset[str], ...]
    zeros: Floats
    """Read-only zeros."""
    lookups: SlotLookups | None = None
    """Cache of the OverlapFinder."""
    saturation_limits: tuple[Floats, Floats] | None = None
    """Cache of the Selector."""


class WorkerTable:
    """See the module."""

    def __init__(
        self,
        loads: WorkerLoads,
        on_row_added: Callable[[int], None],
        on_row_dropped: Callable[[int], None],
        on_model_changed: Callable[[int], None],
    ) -> None:
        """`on_row_added` and `on_row_dropped` are called with the row of a new or removed worker rank,
        `on_model_changed` with the row of one whose worker registered another step model."""
        self._loads = loads
        self._on_row_added = on_row_added
        self._on_row_dropped = on_row_dropped
        self._on_model_changed = on_model_changed
        self._infos: dict[InstanceId, EngineInfo | None] = {}
        self._rows: dict[WorkerDpRank, int] = {}
        self._candidate_sets: dict[tuple[tuple[InstanceId, ...], int | None], CandidateSet] = {}
        self._latest: tuple[tuple[InstanceId, ...], CandidateSet] | None = None

    @property
    def rows(self) -> Mapping[WorkerDpRank, int]:
        """Row of each worker rank."""
        return self._rows

    def set_workers(self, infos: Mapping[InstanceId, EngineInfo | None]) -> None:
        """Set the registered workers, None for unknown metadata."""
        worker_ranks = {WorkerDpRank(each, rank) for each, info in infos.items() for rank in ranks_of(info)}
        for worker_rank in [each for each in self._rows if each not in worker_ranks]:
            row = self._rows.pop(worker_rank)
            self._loads.drop_row(row)
            self._on_row_dropped(row)
        for worker_rank, row in self._rows.items():
            if _step_model(infos[worker_rank.instance_id]) != _step_model(
                self._infos[worker_rank.instance_id]
            ):
                self._on_model_changed(row)
        for worker_rank in sorted(worker_ranks - self._rows.keys()):
            row = self._rows[worker_rank] = self._loads.add_row()
            self._on_row_added(row)
        self._infos = dict(infos)
        self._candidate_sets.clear()
        self._latest = None

    def candidates(self, allowed: Sequence[InstanceId], dp_rank: int | None = None) -> CandidateSet:
        """Candidate set of these workers, of one DP rank if given. Unknown workers are omitted."""
        if dp_rank is None and self._latest is not None and self._latest[0] is allowed:
            return self._latest[1]
        ids = tuple(allowed)
        candidate_set = self._candidate_sets.get((ids, dp_rank))
        if candidate_set is None:
            if len(self._candidate_sets) >= _MAX_CANDIDATE_SETS:
                self._candidate_sets.clear()
            candidate_set = self._candidate_sets[ids, dp_rank] = self._new_candidates(ids, dp_rank)
        if dp_rank is None:
            self._latest = (ids, candidate_set)
        return candidate_set

    def _new_candidates(self, ids: tuple[InstanceId, ...], dp_rank: int | None) -> CandidateSet:
        registered = self._infos
        worker_ranks = [
            WorkerDpRank(each, rank)
            for each in ids
            if each in registered
            for rank in ranks_of(registered[each])
            if dp_rank is None or rank == dp_rank
        ]
        worker_ranks.sort(key=self._rows.__getitem__)  # so that rows are consecutive
        rows = np.array([self._rows[worker_rank] for worker_rank in worker_ranks], dtype=np.intp)
        infos = [registered[worker_rank.instance_id] for worker_rank in worker_ranks]
        zeros = np.zeros(len(worker_ranks))
        zeros.flags.writeable = False
        return CandidateSet(
            tuple(worker_ranks),
            {worker_rank: index for index, worker_rank in enumerate(worker_ranks)},
            rows,
            as_slice(rows),
            CostModel(infos),
            np.array([0.0 if info is None else info.capacity.kv_total_blocks for info in infos]),
            np.array([np.inf if info is None else info.capacity.max_num_seqs for info in infos]),
            np.array([np.inf if info is None else max(info.capacity.max_batch_tokens, 1) for info in infos]),
            tuple(frozenset(() if info is None else info.taints) for info in infos),
            zeros,
        )


def _step_model(info: EngineInfo | None) -> StepModel | None:
    return None if info is None else info.step_model
