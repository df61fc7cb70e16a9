"""Roster: the places where a request can go, as rows of a LoadBook, with what each worker said of itself. Pure.

A place is one data-parallel rank of one worker: it has its own blocks, its own queue and its own row. What does not
change from request to request is worked out once per change of the workers, as arrays over the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvolt.core.card import EngineInfo
from kvolt.core.ids import InstanceId
from kvolt.core.latency import Floats, StepModel
from kvolt.router.index.lookup import Lookups, side_by_side
from kvolt.router.place import Place
from kvolt.router.policy.cost_model import Prices
from kvolt.router.policy.load import LoadBook, Rows

_MAX_FIELDS = 64
"""Sets of candidates that are kept: all of them, those of an adapter, those of a taint."""


@dataclass(slots=True)
class Field:
    """The candidates for a request, an element each in every array."""

    places: tuple[Place, ...]
    index_of: Mapping[Place, int]
    rows: Rows
    at: Rows | slice
    """The same for reading arrays over rows: a slice where it can be, which costs a fraction."""
    prices: Prices
    total_blocks: Floats
    """0 where it is not known."""
    max_seqs: Floats
    """Requests that it computes at once, and prompt tokens in a step; infinite where they are not known."""
    max_batch_tokens: Floats
    taints: tuple[frozenset[str], ...]
    nothing: Floats
    """Zeros, to be read only."""
    lookups: Lookups | None = None
    """Kept here by who looks into the indexes."""
    limits: tuple[Floats, Floats] | None = None
    """Kept here by who says when a place has enough to do."""


class Roster:
    """See the module."""

    def __init__(
        self,
        book: LoadBook,
        on_come: Callable[[int], None],
        on_gone: Callable[[int], None],
        on_new_model: Callable[[int], None],
    ) -> None:
        """`on_come` and `on_gone` are told the row of a place that is new or no more; `on_new_model` that of one whose
        worker has registered another step model."""
        self._book = book
        self._on_come = on_come
        self._on_gone = on_gone
        self._on_new_model = on_new_model
        self._infos: dict[InstanceId, EngineInfo | None] = {}
        self._rows: dict[Place, int] = {}
        self._fields: dict[tuple[tuple[InstanceId, ...], int | None], Field] = {}
        self._latest: tuple[tuple[InstanceId, ...], Field] | None = None

    @property
    def places(self) -> Mapping[Place, int]:
        """All of them, with their rows."""
        return self._rows

    def set_workers(self, infos: Mapping[InstanceId, EngineInfo | None]) -> None:
        """These and no others; None for one of which nothing is known."""
        wanted = {Place(each, rank) for each, info in infos.items() for rank in ranks_of(info)}
        for place in [each for each in self._rows if each not in wanted]:
            row = self._rows.pop(place)
            self._book.drop_row(row)
            self._on_gone(row)
        for place, row in self._rows.items():
            if _step_model(infos[place.instance_id]) != _step_model(self._infos[place.instance_id]):
                self._on_new_model(row)
        for place in sorted(wanted - self._rows.keys()):
            row = self._rows[place] = self._book.add_row()
            self._on_come(row)
        self._infos = dict(infos)
        self._fields.clear()
        self._latest = None

    def field(self, allowed: Sequence[InstanceId], dp_rank: int | None = None) -> Field:
        """The places of these workers, of one rank only if it is named. Who is not known is left out."""
        if dp_rank is None and self._latest is not None and self._latest[0] is allowed:
            return self._latest[1]
        ids = tuple(allowed)
        field = self._fields.get((ids, dp_rank))
        if field is None:
            if len(self._fields) >= _MAX_FIELDS:
                self._fields.clear()
            field = self._fields[ids, dp_rank] = self._new_field(ids, dp_rank)
        if dp_rank is None:
            self._latest = (ids, field)
        return field

    def _new_field(self, ids: tuple[InstanceId, ...], dp_rank: int | None) -> Field:
        known = self._infos
        places = [
            Place(each, rank)
            for each in ids
            if each in known
            for rank in ranks_of(known[each])
            if dp_rank is None or rank == dp_rank
        ]
        places.sort(key=self._rows.__getitem__)  # so that they lie side by side
        rows = np.array([self._rows[place] for place in places], dtype=np.intp)
        infos = [known[place.instance_id] for place in places]
        nothing = np.zeros(len(places))
        nothing.flags.writeable = False
        return Field(
            tuple(places),
            {place: index for index, place in enumerate(places)},
            rows,
            side_by_side(rows),
            Prices(infos),
            np.array([0.0 if info is None else info.capacity.kv_total_blocks for info in infos]),
            np.array([np.inf if info is None else info.capacity.max_num_seqs for info in infos]),
            np.array([np.inf if info is None else info.capacity.max_batch_tokens for info in infos]),
            tuple(frozenset(() if info is None else info.taints) for info in infos),
            nothing,
        )


def _step_model(info: EngineInfo | None) -> StepModel | None:
    return None if info is None else info.step_model


def ranks_of(info: EngineInfo | None) -> tuple[int, ...]:
    """Of a worker: at least one, each once."""
    return tuple(dict.fromkeys(info.dp_ranks)) or (0,) if info is not None else (0,)
