"""Lookup: where the candidates of a request stand in what an index finds, worked out once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvolt.core.latency import Floats


def side_by_side(places: npt.NDArray[np.intp]) -> npt.NDArray[np.intp] | slice:
    """Places in an array: a slice if they are one after the other, which is read at a fraction of the cost."""
    if len(places) and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


class Lookup:
    """An index answers by slot; candidates have a slot each, or none."""

    def __init__(self, slots: Iterable[int | None]) -> None:
        given = list(slots)
        known = [(candidate, slot) for candidate, slot in enumerate(given) if slot is not None]
        self._num_candidates = len(given)
        self._is_whole = len(known) == len(given)
        self._candidates = np.array([candidate for candidate, _ in known], dtype=np.intp)
        self._slots = side_by_side(np.array([slot for _, slot in known], dtype=np.intp))

    def read(self, found: npt.NDArray[np.int32]) -> Floats:
        """By candidate; 0 for one without a slot."""
        if self._is_whole:
            return found[self._slots].astype(float)
        told = np.zeros(self._num_candidates)
        told[self._candidates] = found[self._slots]
        return told


class Lookups(NamedTuple):
    """Of the same candidates in two indexes: of what is held, and of what is expected."""

    version: int
    """Of the slots that they were read off from."""
    held: Lookup
    expected: Lookup
