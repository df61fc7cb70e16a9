"""SlabCopies: an engine's blocks between its memory and slots of the host's, by a thread for each way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvolt.core.ids import BlockKey
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.memory.device_memory import Sums
from kvolt.transfer.memory.slabs import Numbers, Slab


class SlabCopies:
    """A `Copies`."""

    def __init__(self, slabs: Sequence[Slab], memory: SlotMemory) -> None:
        self._memory = memory
        # One each: a prompt that waits for its blocks does not wait for those that go down.
        self._down, self._up = _Way("kv-down", slabs), _Way("kv-up", slabs)

    async def down(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]:
        return await self._down.run(self._memory.fill, slots, keys, self._down.slabs, blocks)

    async def up(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]:
        return await self._up.run(self._memory.empty, slots, keys, self._up.slabs, blocks)

    async def close(self) -> None:
        await asyncio.gather(self._down.close(), self._up.close())


class _Way(TierThread):
    """A thread, and the engine's memory as it is for that thread."""

    def __init__(self, name: str, slabs: Sequence[Slab]) -> None:
        super().__init__(name)
        self.slabs = tuple(slab.for_thread() for slab in slabs)
