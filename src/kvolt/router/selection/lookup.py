"""SlotLookup: maps index results by slot to the candidates of a request; computed once per candidate set. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvolt.router.policy.cost_model import Floats


def as_slice(indexes: npt.NDArray[np.intp]) -> npt.NDArray[np.intp] | slice:
    """Return consecutive indexes as a slice, which is much cheaper to read."""
    if len(indexes) and (np.diff(indexes) == 1).all():
        return slice(int(indexes[0]), int(indexes[-1]) + 1)
    return indexes


class SlotLookup:
    """Slot of each candidate in one index; some candidates may have none."""

    def __init__(self, slots: Iterable[int | None]) -> None:
        slots_or_none = list(slots)
        pairs = [(candidate, slot) for candidate, slot in enumerate(slots_or_none) if slot is not None]
        self._num_candidates = len(slots_or_none)
        self._has_all = len(pairs) == len(slots_or_none)
        self._candidates = np.array([candidate for candidate, _ in pairs], dtype=np.intp)
        self._slots = as_slice(np.array([slot for _, slot in pairs], dtype=np.intp))

    def read(self, values_by_slot: npt.NDArray[np.int32]) -> Floats:
        """Values by candidate; 0 for one without a slot."""
        if self._has_all:
            return values_by_slot[self._slots].astype(float)
        values = np.zeros(self._num_candidates)
        values[self._candidates] = values_by_slot[self._slots]
        return values


class SlotLookups(NamedTuple):
    """Lookups of the same candidates in the prefix index and in the pending blocks."""

    version: int
    """`slots_version` that they were computed for."""
    prefix: SlotLookup
    pending: SlotLookup
