"""Bytes of blocks from memory to memory and through sockets: native where it was built, else the same in Python, which
is slower and equally right.

`bytes_python` says what each function does; ADR 9 says how native modules are built.
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
