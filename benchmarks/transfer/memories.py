"""The memory that blocks travel from and the one that they travel to: two memfds, which every process here maps.

All systems read the same pages and write the same pages, and the parent process can compare source and target. Which
blocks go where is one random order for all.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Memories:
    """By their descriptors."""

    source: int
    target: int
    num_bytes: int

    @classmethod
    def new(cls, num_bytes: int) -> Memories:
        made = cls(_memory("bench-source", num_bytes), _memory("bench-target", num_bytes), num_bytes)
        made.map_source()[:] = np.random.default_rng(7).integers(0, 256, num_bytes, dtype=np.uint8)
        return made

    @property
    def descriptors(self) -> tuple[int, int]:
        return self.source, self.target

    def map_source(self) -> Bytes:
        return _mapped(self.source, self.num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)

    def map_source_to_read(self) -> Bytes:
        return _mapped(self.source, self.num_bytes, mmap.PROT_READ)

    def map_target(self) -> Bytes:
        return _mapped(self.target, self.num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def order(num_blocks: int, of_target: bool) -> Numbers:
    """Numbers of all blocks: the n-th of the source goes to the n-th of the target. Other orders, so runs are rare."""
    numbers: Any = np.random.default_rng(2 if of_target else 1).permutation(num_blocks)
    return np.ascontiguousarray(numbers, dtype=np.int64)


def arrived(source: Bytes, target: Bytes, block_bytes: int) -> bool:
    """Whether each block of the source lies where it was to go."""
    num_blocks = len(source) // block_bytes
    left = source.reshape(num_blocks, block_bytes)
    came = target.reshape(num_blocks, block_bytes)
    pairs = zip(order(num_blocks, of_target=False), order(num_blocks, of_target=True), strict=True)
    return all(np.array_equal(left[there], came[here]) for there, here in pairs)


def _memory(name: str, num_bytes: int) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # kvolt seals its size
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def _mapped(descriptor: int, num_bytes: int, protection: int) -> Bytes:
    """Mapped with all pages present: no result includes page faults."""
    memory: Bytes = np.frombuffer(mmap.mmap(descriptor, num_bytes, prot=protection), dtype=np.uint8)
    if protection & mmap.PROT_WRITE:
        memory[::PAGE_BYTES] |= 0
    else:
        memory[::PAGE_BYTES].max()
    return memory
