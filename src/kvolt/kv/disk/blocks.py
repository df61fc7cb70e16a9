"""DiskBlocks: copies blocks between host slots and disk slots, in the disk's format.

A stored block has the checksum of its stored bytes, a loaded block that of the loaded bytes; they differ if the format
is lossy. A block is therefore verified again before its encoded form gets its own checksum, so that corruption in
memory is not stored as an intact block. Synchronous; used in the tier's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from kvolt.core.errors import KvoltError
from kvolt.core.ids import BlockKey
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.fp8 import Fp8
from kvolt.kv.disk.journal import SlotRecord
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.slot_table import Slot, TierBlock
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_STEP_BYTES = 8 << 20
"""Bytes of encoded blocks per step."""

Sums = list[int | None]
"""Checksum per block; None if it is not intact."""


class DiskBlocks:
    """See the module. No call may be in progress on `close`."""

    def __init__(self, files: DiskFiles) -> None:
        self._files = files
        self._batch_blocks = max(_STEP_BYTES // files.shape.slot_bytes, 1)
        self._codec: tuple[Fp8, SlotMemory] | None = None
        """Format and buffer for encoded blocks."""
        if files.form is not None:
            self._codec = files.form, SlotMemory(files.shape, self._batch_blocks)

    def close(self) -> None:
        if self._codec is not None:
            self._codec[1].close()

    def write(
        self,
        blocks: Sequence[TierBlock],
        checksums: Sequence[int],
        slots: Sequence[Slot],
        memory: SlotMemory,
        sources: Numbers,
        freed: Iterable[Slot] = (),
    ) -> Sums:
        """Write host slots to disk slots and free the slots `freed`, durably.

        Return the checksum of each stored block; None for one that failed its checksum. TransferFailed on I/O errors.
        """
        keys = [block.key for block in blocks]
        if self._codec is None:
            self._files.write(slots, memory, sources)
            sums: Sums = list(checksums)
        else:
            sums = []
            for batch in self._batches(len(keys)):
                sums += self._write_encoded(
                    keys[batch], checksums[batch], slots[batch], memory, sources[batch], *self._codec
                )
        stored = zip(slots, blocks, sums, strict=True)
        written = [SlotRecord(slot, block, each) for slot, block, each in stored if each is not None]
        self._files.commit(written, freed)
        return sums

    def _write_encoded(
        self,
        keys: Sequence[BlockKey],
        checksums: Sequence[int],
        slots: Sequence[Slot],
        memory: SlotMemory,
        sources: Numbers,
        codec: Fp8,
        buffer: SlotMemory,
    ) -> Sums:
        buffer_slots = np.arange(len(keys), dtype=np.int64)
        codec.encode(memory, sources, buffer, buffer_slots)
        # After encoding, so that any earlier corruption is detected.
        are_good = memory.checksums(sources, keys) == np.asarray(checksums, dtype=np.uint64)
        good = np.flatnonzero(are_good)
        encoded_sums = buffer.checksums(buffer_slots, keys).tolist()
        self._files.write([slots[index] for index in good.tolist()], buffer, good)
        return [
            each if is_good else None for each, is_good in zip(encoded_sums, are_good.tolist(), strict=True)
        ]

    def read(
        self,
        keys: Sequence[BlockKey],
        expected: Sequence[int],
        slots: Sequence[Slot],
        memory: SlotMemory,
        destinations: Numbers,
    ) -> Sums:
        """Read disk slots with the `expected` checksums into host slots; return the checksums of the loaded bytes."""
        if self._codec is None:
            are_good = self._check_read(keys, expected, slots, memory, destinations)
            return [each if is_good else None for each, is_good in zip(expected, are_good, strict=True)]
        codec, buffer = self._codec
        loaded: Sums = []
        for batch in self._batches(len(keys)):
            batch_keys, into = keys[batch], destinations[batch]
            are_good = self._check_read(
                batch_keys, expected[batch], slots[batch], buffer, np.arange(len(batch_keys))
            )
            good = np.flatnonzero(are_good)
            codec.decode(buffer, good, memory, into[good])
            sums = memory.checksums(into[good], [batch_keys[index] for index in good.tolist()])
            by_index = dict(zip(good.tolist(), sums.tolist(), strict=True))
            loaded += [by_index.get(index) for index in range(len(batch_keys))]
        return loaded

    def _batches(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self._batch_blocks):
            yield slice(start, start + self._batch_blocks)

    def _check_read(
        self,
        keys: Sequence[BlockKey],
        expected: Sequence[int],
        slots: Sequence[Slot],
        memory: SlotMemory,
        destinations: Numbers,
    ) -> list[bool]:
        """Read stored blocks and return which are intact. Reads one by one if the joint read fails."""
        try:
            self._files.read(slots, memory, destinations)
            are_read = [True] * len(keys)
        except KvoltError:
            are_read = [
                self._read_one(slot, memory, destinations[index : index + 1])
                for index, slot in enumerate(slots)
            ]
        sums = self._sums(memory, destinations, keys)
        return [ok and actual == due for ok, actual, due in zip(are_read, sums, expected, strict=True)]

    def _sums(self, memory: SlotMemory, slots: Numbers, keys: Sequence[BlockKey]) -> list[int]:
        sums = np.empty(len(keys), dtype=np.uint64)

        def compute(batch: slice) -> None:
            sums[batch] = memory.checksums(slots[batch], keys[batch])

        self._files.threads.run([partial(compute, batch) for batch in self._batches(len(keys))])
        return sums.tolist()

    def _read_one(self, slot: Slot, memory: SlotMemory, destination: Numbers) -> bool:
        try:
            self._files.read([slot], memory, destination)
        except KvoltError as error:
            log.warning("block unreadable: tier=disk error=%s", error.message)
            return False
        return True
