"""Prefix index of the router: native C if it was built, else the equivalent but slower Python.

`prefix_index_python` is the reference; ADR 9 describes the native index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

__all__ = ["DEFAULT_MAX_BYTES", "IS_NATIVE", "MAX_SLOTS", "MIN_MAX_BYTES", "NUM_TIERS", "BlockIndex"]
