"""DiskBlocks: blocks between slots of the host's memory and slots of a disk, in the form in which they lie there.

A block at rest has the checksum of the bytes that lie there. One that comes up has that of the bytes that came,
which where the form is another are others. So a block that goes down is held against its checksum once more before
what became of it gets one of its own: what was spoiled in the memory must not be whole on the disk. Synchronous;
for the tier's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from kvolt.core.errors import KvoltError
from kvolt.core.ids import BlockKey
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.fp8 import EightBits
from kvolt.kv.disk.journal import Written
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.slot_table import Slot, TierBlock
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_TURN_BYTES = 8 << 20
"""Of blocks in the disk's form, on their way."""

Sums = list[int | None]
"""Of each block; None for one that did not get there whole."""


class DiskBlocks:
    """See the module. `close` when nothing is under way."""

    def __init__(self, files: DiskFiles) -> None:
        self._files = files
        self._at_once = max(_TURN_BYTES // files.shape.slot_bytes, 1)
        self._packing: tuple[EightBits, SlotMemory] | None = None
        """The form, and a memory for blocks on their way."""
        if files.form is not None:
            self._packing = files.form, SlotMemory(files.shape, self._at_once)

    def close(self) -> None:
        if self._packing is not None:
            self._packing[1].close()

    def write(
        self,
        blocks: Sequence[TierBlock],
        checksums: Sequence[int],
        slots: Sequence[Slot],
        memory: SlotMemory,
        sources: Numbers,
        gone: Iterable[Slot] = (),
    ) -> Sums:
        """Slots of the memory into slots of the disk, where they are for good on return, and so is that `gone` hold
        nothing any more. The checksums of what lies there; none of what was not what it should be. TransferFailed."""
        keys = [block.key for block in blocks]
        if self._packing is None:
            self._files.put(slots, memory, sources)
            sums: Sums = list(checksums)
        else:
            sums = []
            for some in self._turns(len(keys)):
                sums += self._put(
                    keys[some], checksums[some], slots[some], memory, sources[some], *self._packing
                )
        found = zip(slots, blocks, sums, strict=True)
        written = [Written(slot, block, each) for slot, block, each in found if each is not None]
        self._files.keep(written, gone)
        return sums

    def _put(
        self,
        keys: Sequence[BlockKey],
        checksums: Sequence[int],
        slots: Sequence[Slot],
        memory: SlotMemory,
        sources: Numbers,
        form: EightBits,
        turn: SlotMemory,
    ) -> Sums:
        places = np.arange(len(keys), dtype=np.int64)
        form.encode(memory, sources, turn, places)
        # After that: whatever was spoiled before is seen.
        are_good = memory.checksums(sources, keys) == np.asarray(checksums, dtype=np.uint64)
        good = np.flatnonzero(are_good)
        packed = turn.checksums(places, keys).tolist()
        self._files.put([slots[index] for index in good.tolist()], turn, good)
        return [found if is_good else None for found, is_good in zip(packed, are_good.tolist(), strict=True)]

    def read(
        self,
        keys: Sequence[BlockKey],
        expected: Sequence[int],
        slots: Sequence[Slot],
        memory: SlotMemory,
        destinations: Numbers,
    ) -> Sums:
        """Slots of the disk, which should have these checksums, into slots of the memory; checksums of what came."""
        if self._packing is None:
            are_good = self._check_read(keys, expected, slots, memory, destinations)
            return [each if is_good else None for each, is_good in zip(expected, are_good, strict=True)]
        form, turn = self._packing
        came: Sums = []
        for some in self._turns(len(keys)):
            names, into = keys[some], destinations[some]
            are_good = self._check_read(names, expected[some], slots[some], turn, np.arange(len(names)))
            good = np.flatnonzero(are_good)
            form.decode(turn, good, memory, into[good])
            sums = memory.checksums(into[good], [names[index] for index in good.tolist()])
            found = dict(zip(good.tolist(), sums.tolist(), strict=True))
            came += [found.get(index) for index in range(len(names))]
        return came

    def _turns(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self._at_once):
            yield slice(start, start + self._at_once)

    def _check_read(
        self,
        keys: Sequence[BlockKey],
        expected: Sequence[int],
        slots: Sequence[Slot],
        memory: SlotMemory,
        destinations: Numbers,
    ) -> list[bool]:
        """Read what lies there, and look whether each is what it was. One by one where all at once cannot be read."""
        try:
            self._files.read(slots, memory, destinations)
            are_read = [True] * len(keys)
        except KvoltError:
            are_read = [
                self._reads(slot, memory, destinations[index : index + 1]) for index, slot in enumerate(slots)
            ]
        sums = self._sums(memory, destinations, keys)
        return [ok and found == wanted for ok, found, wanted in zip(are_read, sums, expected, strict=True)]

    def _sums(self, memory: SlotMemory, slots: Numbers, keys: Sequence[BlockKey]) -> list[int]:
        found = np.empty(len(keys), dtype=np.uint64)

        def sum_up(some: slice) -> None:
            found[some] = memory.checksums(slots[some], keys[some])

        self._files.threads.run([partial(sum_up, some) for some in self._turns(len(keys))])
        return found.tolist()

    def _reads(self, slot: Slot, memory: SlotMemory, destination: Numbers) -> bool:
        try:
            self._files.read([slot], memory, destination)
        except KvoltError as error:
            log.warning("a block of the disk tier is lost: %s", error.message)
            return False
        return True
