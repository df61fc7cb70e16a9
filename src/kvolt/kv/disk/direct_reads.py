"""DirectReads: blocks of a disk tier straight into an engine's memory, past the host's.

By NIXL, with GPUDirect Storage where the engine's memory is a device's (`transfer.nixl_files`). What arrived is summed
where it lies and held against the disk's books, as on any other way. Only up: what goes down goes by the host, which
takes it off the device faster than a disk would.
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

_MOST_FAILURES = 3
"""In a row; then blocks come by the host for good."""


class DirectReads:
    """See the module. `start` it after the tier, and `close` it before."""

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
        return files is not None and not files.is_stuck and self._num_failures < _MOST_FAILURES

    async def start(self) -> None:
        """ConfigError where the system cannot."""
        try:
            files, _ = await self._thread.run(self._make)
        except Unsupported as error:
            raise ConfigError(
                error.message,
                key="tiers.disk_direct",
                remedy="leave it out: blocks come by the host then. GPUDirect Storage needs a file system that cuFile "
                "knows, and /run/udev to be seen in a container (gdscheck -p tells)",
            ) from None
        self._files = files
        log.info("blocks come from the disk by NIXL's %s", files.backend)

    def _make(self) -> NixlFiles:
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
        """Blocks into these of the engine's memory; how many came whole, from the first on."""
        there = list(takewhile(lambda block: self._disk.has(block.key), blocks))
        if not there:
            return 0
        into = np.asarray(numbers[: len(there)], dtype=np.int64)
        try:
            sums = await self._disk.read_by(self._thread, there, partial(self._read, into))
        except TransferFailed as error:
            self._num_failures += 1
            self._disk.stats.failures["unread"] += len(there)
            log.warning(
                "%s%s", error.message, "" if self.is_usable else ": from now on they come by the host"
            )
            return 0
        self._num_failures = 0
        return next((index for index, found in enumerate(sums) if found is None), len(sums))

    def _read(
        self, numbers: Numbers, keys: Sequence[BlockKey], expected: Sequence[int], slots: Sequence[Slot]
    ) -> list[int | None]:
        if self._files is None:
            raise TransferFailed("the disk tier is closed", path="disk", reason="closed")
        places = self._disk.files.places(np.asarray(slots, dtype=np.int64))
        for path, offsets, which in places:
            for rank, slab in enumerate(self._slabs):
                self._files.read(path, offsets, rank, numbers[which], skipped=rank * slab.block_bytes)
        found = block_checksums(self._slabs, numbers, keys).tolist()
        return [due if each == due else None for each, due in zip(found, expected, strict=True)]
