"""EightBits: blocks whose values take eight bits each, native where that was built, else the same in numpy.

What the bits mean: `eight_bits_python`. Lossy: what comes back is near to what went in, and not equal. The size of
a block in this form depends on nothing but its size before, so that tiers of equal slots can have it.
"""

from __future__ import annotations

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


class EightBits(msgspec.Struct, frozen=True):
    """The form of blocks whose values were of a dtype. `of` and `named` make one."""

    dtype: str

    @classmethod
    def of(cls, shape: BlockShape) -> EightBits:
        """For blocks like this. ConfigError where they have no values that it knows."""
        if shape.dtype not in KINDS or shape.piece_bytes % WIDTHS[KINDS.index(shape.dtype)]:
            told = f"its values are {shape.dtype}" if shape.dtype else "it does not say of what values"
            raise ConfigError(
                f"KV of this engine cannot be kept in eight bits: {told}; known: {', '.join(KINDS)}",
                key="tiers.disk_compression",
                remedy='leave out disk_compression = "fp8", or serve with one of these as the KV\'s dtype',
            )
        return cls(shape.dtype)

    @classmethod
    def named(cls, name: str) -> EightBits | None:
        """Of what `name` gave; None for a form that this version does not know."""
        dtype = name.removeprefix(_PREFIX)
        return cls(dtype) if name.startswith(_PREFIX) and dtype in KINDS else None

    @property
    def name(self) -> str:
        """By which it is told apart from every other form, also of other versions."""
        return f"{_PREFIX}{self.dtype}"

    @property
    def _kind(self) -> int:
        return KINDS.index(self.dtype)

    def packed(self, shape: BlockShape) -> BlockShape:
        """Of blocks in this form that had that shape."""
        return BlockShape(packed_bytes(shape.piece_bytes // WIDTHS[self._kind]), shape.num_ranks)

    def unpacked(self, shape: BlockShape) -> BlockShape:
        """The other way."""
        num_values = shape.piece_bytes - -(-shape.piece_bytes // (GROUP + 1))
        return BlockShape(num_values * WIDTHS[self._kind], shape.num_ranks, self.dtype)

    def encode(self, memory: SlotMemory, sources: Numbers, packed: SlotMemory, places: Numbers) -> None:
        """Slots of a memory into slots of one with packed blocks."""
        num_values = memory.shape.piece_bytes // WIDTHS[self._kind]
        for there, to, which in packed.by_part(places):
            for here, numbers, index in memory.by_part(sources[which]):
                for rank in range(memory.shape.num_ranks):
                    ours, theirs = memory.pieces(numbers, rank), packed.pieces(to[index], rank)
                    encode(there.memory, theirs.offsets, here.memory, ours.offsets, num_values, self._kind)

    def decode(self, packed: SlotMemory, places: Numbers, memory: SlotMemory, slots: Numbers) -> None:
        """The other way."""
        num_values = memory.shape.piece_bytes // WIDTHS[self._kind]
        for there, numbers, which in packed.by_part(places):
            for here, to, index in memory.by_part(slots[which]):
                for rank in range(memory.shape.num_ranks):
                    ours, theirs = memory.pieces(to, rank), packed.pieces(numbers[index], rank)
                    decode(here.memory, ours.offsets, there.memory, theirs.offsets, num_values, self._kind)
