"""The index of the router: native where it was built, else the same in Python, which is slower and equally right.

`index_python` says what it does; ADR 9 says how the native one is built.
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
