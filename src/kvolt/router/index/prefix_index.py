"""Prefix index of the router: its protocol, and BlockIndex in C if it was built, else in equivalent, slower Python.

`prefix_index_python` is the reference; ADR 9 describes the native index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvolt.core.ids import InstanceId
from kvolt.router.index.prefix_index_python import DEFAULT_MAX_BYTES, MAX_SLOTS, MIN_MAX_BYTES, NUM_TIERS

if TYPE_CHECKING:
    from kvolt.router.index.prefix_index_python import BlockIndex

    IS_NATIVE: bool
else:
    try:
        from kvolt.router.index._index_native import BlockIndex

        IS_NATIVE = True
    except ImportError:
        from kvolt.router.index.prefix_index_python import BlockIndex

        IS_NATIVE = False

__all__ = [
    "DEFAULT_MAX_BYTES",
    "IS_NATIVE",
    "MAX_SLOTS",
    "MIN_MAX_BYTES",
    "NUM_TIERS",
    "BlockIndex",
    "PrefixIndex",
]


class PrefixIndex(Protocol):
    """Prefix index over all workers."""

    @property
    def slots_version(self) -> int:
        """Changes whenever a slot assignment changes."""
        ...

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """Number of leading blocks of a prompt that each slot holds on its device."""
        ...

    def find_local_tiers(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        """The same by tier, each including the faster ones; None if no worker publishes lower tiers."""
        ...

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        """Slot of a worker rank; None if nothing is known of it."""
        ...
