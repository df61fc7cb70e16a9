"""Fp8: lossy FP8 format of blocks; native module if built, else the numpy equivalent.

The encoding is defined in `fp8_python`. The encoded size depends only on the original size, so tiers with equal slots
can use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.kv.disk.fp8_python import GROUP, KINDS, WIDTHS, packed_bytes
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.transfer.memory.slabs import Numbers

if TYPE_CHECKING:
    from kvolt.kv.disk.fp8_python import decode, encode

    IS_NATIVE: bool
else:
    try:
        from kvolt.kv.disk._fp8_native import decode, encode

        IS_NATIVE = True
    except ImportError:
        from kvolt.kv.disk.fp8_python import decode, encode

        IS_NATIVE = False

_PREFIX = f"fp8x{GROUP}-"


class Fp8(msgspec.Struct, frozen=True):
    """FP8 format for values of one dtype. Created by `of` and `named`."""

    dtype: str

    @classmethod
    def of(cls, shape: BlockShape) -> Fp8:
        """Format for blocks of this shape. ConfigError if the dtype is not supported."""
        if shape.dtype not in KINDS or shape.piece_bytes % WIDTHS[KINDS.index(shape.dtype)]:
            reason = f"its dtype is {shape.dtype}" if shape.dtype else "its dtype is unknown"
            raise ConfigError(
                f"cannot store the KV of this engine as fp8: {reason}; supported: {', '.join(KINDS)}",
                key="tiers.disk_compression",
                remedy='remove disk_compression = "fp8", or serve with a supported KV dtype',
            )
        return cls(shape.dtype)

    @classmethod
    def named(cls, name: str) -> Fp8 | None:
        """Format with this `name`; None if unknown to this version."""
        dtype = name.removeprefix(_PREFIX)
        return cls(dtype) if name.startswith(_PREFIX) and dtype in KINDS else None

    @property
    def name(self) -> str:
        """Unique name of the format, across versions."""
        return f"{_PREFIX}{self.dtype}"

    @property
    def _kind(self) -> int:
        return KINDS.index(self.dtype)

    def packed(self, shape: BlockShape) -> BlockShape:
        """Encoded shape of blocks of `shape`."""
        return BlockShape(packed_bytes(shape.piece_bytes // WIDTHS[self._kind]), shape.num_ranks)

    def unpacked(self, shape: BlockShape) -> BlockShape:
        """Decoded shape of encoded blocks of `shape`."""
        num_values = shape.piece_bytes - -(-shape.piece_bytes // (GROUP + 1))
        return BlockShape(num_values * WIDTHS[self._kind], shape.num_ranks, self.dtype)

    def encode(self, memory: SlotMemory, sources: Numbers, packed: SlotMemory, places: Numbers) -> None:
        """Encode slots of `memory` into slots of `packed`."""
        for wide_part, wide, packed_part, offsets in _piece_pairs(memory, sources, packed, places):
            num_values = memory.shape.piece_bytes // WIDTHS[self._kind]
            encode(packed_part, offsets, wide_part, wide, num_values, self._kind)

    def decode(self, packed: SlotMemory, places: Numbers, memory: SlotMemory, slots: Numbers) -> None:
        """Decode slots of `packed` into slots of `memory`."""
        for wide_part, wide, packed_part, offsets in _piece_pairs(memory, slots, packed, places):
            num_values = memory.shape.piece_bytes // WIDTHS[self._kind]
            decode(wide_part, wide, packed_part, offsets, num_values, self._kind)


def _piece_pairs(
    memory: SlotMemory, slots: Numbers, packed: SlotMemory, places: Numbers
) -> Iterator[tuple[memoryview, Numbers, memoryview, Numbers]]:
    """Memory and offsets of pieces in `memory` and in `packed`, per rank and pair of parts."""
    for packed_part, packed_slots, indexes in packed.by_part(places):
        for part, part_slots, positions in memory.by_part(slots[indexes]):
            for rank in range(memory.shape.num_ranks):
                wide = memory.pieces(part_slots, rank).offsets
                yield (
                    part.memory,
                    wide,
                    packed_part.memory,
                    packed.pieces(packed_slots[positions], rank).offsets,
                )
