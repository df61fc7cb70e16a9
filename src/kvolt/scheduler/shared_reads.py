"""Counts KV blocks that several decoding sequences read. Pure.

Gives the part of a decode step's context that is read more than once; its cost is a property of the kernels
(`core.latency`, `shared_kv_read`). Only prompt blocks can be shared, so a sequence is counted once, from its
first decode until it leaves.
"""

from __future__ import annotations

from kvolt.kv import BlockId
from kvolt.scheduler.sequence import Sequence


class SharedReads:
    """See the module."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_readers: dict[BlockId, int] = {}
        self._blocks: dict[Sequence, list[BlockId]] = {}
        """Counted blocks of each decoding sequence."""
        self._num_repeated = 0

    @property
    def num_tokens(self) -> int:
        """Tokens per step whose KV another sequence has read as well."""
        return self._num_repeated * self._block_size

    def add(self, sequence: Sequence) -> None:
        """Count the blocks of a computed prompt. No effect if it is counted already."""
        if sequence in self._blocks:
            return
        blocks = self._blocks[sequence] = sequence.blocks[: sequence.num_to_prefill // self._block_size]
        num_readers = self._num_readers
        for block in blocks:
            readers = num_readers.get(block, 0)
            num_readers[block] = readers + 1
            if readers:
                self._num_repeated += 1

    def remove(self, sequence: Sequence) -> None:
        """The sequence no longer decodes. No effect if it is not counted."""
        num_readers = self._num_readers
        for block in self._blocks.pop(sequence, ()):
            readers = num_readers[block] - 1
            if readers:
                num_readers[block] = readers
                self._num_repeated -= 1
            else:
                del num_readers[block]
