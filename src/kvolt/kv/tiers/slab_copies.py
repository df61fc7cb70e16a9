"""SlabCopier: copies blocks between an engine's slabs and host slots, with one thread per direction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvolt.core.ids import BlockKey
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.memory.pieces import Sums
from kvolt.transfer.memory.slabs import Numbers, Slab


class SlabCopier:
    """BlockCopier for slabs."""

    def __init__(self, slabs: Sequence[Slab], memory: SlotMemory) -> None:
        self._memory = memory
        # Separate threads, so that onboarding does not wait for offloads.
        self._down, self._up = _CopyThread("kv-down", slabs), _CopyThread("kv-up", slabs)

    async def offload(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]:
        return await self._down.run(self._memory.fill, slots, keys, self._down.slabs, blocks)

    async def onboard(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]:
        return await self._up.run(self._memory.empty, slots, keys, self._up.slabs, blocks)

    async def close(self) -> None:
        await asyncio.gather(self._down.close(), self._up.close())


class _CopyThread(TierThread):
    """Thread with its own view of the engine's slabs."""

    def __init__(self, name: str, slabs: Sequence[Slab]) -> None:
        super().__init__(name)
        self.slabs = tuple(slab.for_thread() for slab in slabs)
