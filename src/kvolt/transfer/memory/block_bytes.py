"""Copies and sends block bytes: the native module if it was built, else the slower Python equivalent.

The functions are documented in `block_bytes_python`; ADR 9 covers native modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvolt.transfer.memory.block_bytes_python import checksums, copy, copy_checked, receive, send

    IS_NATIVE: bool
else:
    try:
        from kvolt.transfer.memory._bytes_native import checksums, copy, copy_checked, receive, send

        IS_NATIVE = True
    except ImportError:
        from kvolt.transfer.memory.block_bytes_python import checksums, copy, copy_checked, receive, send

        IS_NATIVE = False

__all__ = ["IS_NATIVE", "checksums", "copy", "copy_checked", "receive", "send"]
