"""DirectReads: reads blocks of a disk tier directly into an engine's memory, bypassing host memory.

Uses NIXL, with GPUDirect Storage for device memory (`transfer.nixl.files`). Blocks are verified in the engine's memory
against the checksums of the disk tier. Reads only; writes go through host memory, which accepts them faster than a
disk.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import takewhile

import numpy as np

from kvolt.core.errors import ConfigError, TransferFailed, Unsupported
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.slot_memory import block_checksums
from kvolt.kv.tiers.slot_table import Slot, TierBlock
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.nixl.files import NixlFiles

log = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Consecutive failures after which direct reads are disabled."""


class DirectReads:
    """See the module. `start` after the tier, `close` before it."""

    tier = Tier.DISK

    def __init__(self, disk: DiskTier, slabs: Sequence[Slab]) -> None:
        self._disk = disk
        self._slabs = tuple(slab.for_thread() for slab in slabs)
        self._thread = TierThread("kv-direct")
        self._files: NixlFiles | None = None
        self._num_failures = 0

    @property
    def is_usable(self) -> bool:
        files = self._files
        return files is not None and not files.is_stuck and self._num_failures < _MAX_FAILURES

    async def start(self) -> None:
        """ConfigError if the system does not support it."""
        try:
            files, _ = await self._thread.run(self._open_files)
        except Unsupported as error:
            raise ConfigError(
                error.message,
                key="tiers.disk_direct",
                remedy="disable it to read through host memory. GPUDirect Storage needs a file system that cuFile "
                "supports, and /run/udev mounted in a container (check with gdscheck -p)",
            ) from None
        self._files = files
        log.info("direct disk reads enabled: backend=%s", files.backend)

    def _open_files(self) -> NixlFiles:
        files = NixlFiles(self._slabs, is_direct=self._disk.files.is_direct)
        try:
            files.probe(self._disk.folder)
        except BaseException:
            files.close()
            raise
        return files

    async def close(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            await self._thread.run(files.close)
        await self._thread.close()

    async def read(self, blocks: Sequence[TierBlock], numbers: Sequence[int]) -> int:
        """Read into these engine blocks; return the length of the intact prefix."""
        present = list(takewhile(lambda block: self._disk.has(block.key), blocks))
        if not present:
            return 0
        into = np.asarray(numbers[: len(present)], dtype=np.int64)
        try:
            sums = await self._disk.read_with(self._thread, present, partial(self._read, into))
        except TransferFailed as error:
            self._num_failures += 1
            self._disk.stats.failures["unread"] += len(present)
            log.warning("direct read failed: error=%s is_disabled=%s", error.message, not self.is_usable)
            return 0
        self._num_failures = 0
        return next((index for index, checksum in enumerate(sums) if checksum is None), len(sums))

    def _read(
        self, numbers: Numbers, keys: Sequence[BlockKey], expected: Sequence[int], slots: Sequence[Slot]
    ) -> list[int | None]:
        if self._files is None:
            raise TransferFailed("the disk tier is closed", path="disk", reason="closed")
        locations = self._disk.files.locations(np.asarray(slots, dtype=np.int64))
        for path, offsets, indexes in locations:
            for rank, slab in enumerate(self._slabs):
                self._files.read(path, offsets, rank, numbers[indexes], skipped=rank * slab.block_bytes)
        actual = block_checksums(self._slabs, numbers, keys).tolist()
        return [due if each == due else None for each, due in zip(actual, expected, strict=True)]
