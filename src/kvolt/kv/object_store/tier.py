"""ObjectTier: blocks in an object store that many share. Knows which it has as far as it has asked.

What is there is nobody's alone: others write and remove, so what is known of it is a guess that a read corrects. Of a
prompt's blocks those from the first on are mostly there or not, so that the end of them is found by a few questions,
some of them at once (`look`). Bounded in what it remembers. Routers are not told of it: every worker reaches it alike.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvolt.core.errors import KvoltError
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.changes import Change
from kvolt.kv.object_store.blocks import Came, ObjectBlocks
from kvolt.kv.object_store.known_keys import KnownKeys
from kvolt.kv.tiers.lower_tier import TierStats
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_MOST_ABSENT = 1 << 14
_ABSENT_S = 10.0
"""After a block was not there, before it is asked for again."""
_QUESTIONS = 16
"""At once: a prompt of 4,000 blocks takes three rounds of them."""
_AT_ONCE = 64
"""Blocks, between which others have their turn: who does not want the rest any more waits for no more than these."""
_LOOK_S = 0.5
"""For all of them."""
_PATIENCE_S = 2.0
"""A read that is given up after this was too slow; before, somebody did not want it any more."""
_PAUSE_S = 10.0
"""After the store did not answer, before it is asked again."""


class ObjectTier:
    """A `LowerTier`."""

    tier = Tier.OBJECT
    look_s: float | None = 0.02
    num_slots = None
    has_chores = False

    def __init__(self, blocks: ObjectBlocks, now: Callable[[], float]) -> None:
        self._blocks = blocks
        self._now = now
        self.stats = TierStats()
        self._known = KnownKeys()
        """Read or written lately, or found by a `look`."""
        self._writing: set[BlockKey] = set()
        self._absent: OrderedDict[BlockKey, float] = OrderedDict()
        """Until when it is not asked for."""
        self._spoiled = KnownKeys(_MOST_ABSENT)
        """Objects that are no blocks: to be replaced when there is one again."""
        self._asked_again_at = 0.0
        # Three: a prompt does not wait behind what is written, nor a question behind a prompt.
        self._readers, self._writers = TierThread("kv-object-read"), TierThread("kv-object-write")
        self._askers = TierThread("kv-object-ask")

    def __len__(self) -> int:
        return len(self._known)

    async def start(self) -> None:
        """Nothing is read ahead: a store may have more blocks than there is memory to know them."""

    async def close(self) -> None:
        for thread in (self._readers, self._writers, self._askers):
            await thread.close()
        await asyncio.to_thread(self._blocks.close)

    def has(self, key: BlockKey) -> bool:
        return key in self._known and self._now() >= self._asked_again_at

    def knows(self, key: BlockKey) -> bool:
        return key in self._known or key in self._writing

    # --- finding

    async def look(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        start = self._known.num_known(keys)
        now = self._now()
        if start == len(keys) or now < self._asked_again_at or self._absent.get(keys[start], 0.0) > now:
            return
        try:
            async with asyncio.timeout(_LOOK_S):
                await self._find_end(keys, start)
        except TimeoutError:
            log.warning("%s did not say within %g s what it has", self._blocks.url, _LOOK_S)
            self._asked_again_at = self._now() + _PAUSE_S
        except KvoltError as error:
            self._out_of_reach(error)

    async def _find_end(self, keys: Sequence[BlockKey], start: int) -> None:
        """Of blocks from `start` on, those that are there; `end`: the first that is known not to be."""
        end = len(keys)
        while start < end:
            places = _spread(start, end, _QUESTIONS)
            are_there = await self._askers.ask(self._blocks.are_there, [keys[place] for place in places])
            num_there = are_there.index(False) if False in are_there else len(places)
            if num_there < len(places):
                end = places[num_there]
            if num_there:
                self._learn(keys[start : places[num_there - 1] + 1])
                start = places[num_there - 1] + 1
        if end < len(keys):
            self._miss(keys[end])

    def _learn(self, keys: Sequence[BlockKey]) -> None:
        self._known.add(keys)
        for key in keys:
            self._absent.pop(key, None)

    def _miss(self, key: BlockKey) -> None:
        self._known.forget([key])
        self._absent[key] = self._now() + _ABSENT_S
        self._absent.move_to_end(key)
        if len(self._absent) > _MOST_ABSENT:
            self._absent.popitem(last=False)

    def _out_of_reach(self, error: KvoltError) -> None:
        log.warning("the object tier is out of reach for %g s: %s", _PAUSE_S, error.message)
        self._asked_again_at = self._now() + _PAUSE_S

    # --- moving

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        keys = [block.key for block in blocks]
        self._writing.update(keys)
        try:
            for start in range(0, len(keys), _AT_ONCE):
                some = slice(start, start + _AT_ONCE)
                replaced = self._spoiled.keys() & set(keys[some])
                are_new, took_s = await self._writers.run(
                    self._blocks.write, keys[some], checksums[some], memory, slots[some], replaced
                )
                self._spoiled.forget(replaced)
                self._learn(keys[some])
                self.stats.stored(sum(are_new), took_s)
        finally:
            self._writing.difference_update(keys)

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        keys = [block.key for block in blocks]
        came: list[int | None] = []
        began_at = self._now()
        try:
            for start in range(0, len(keys), _AT_ONCE):
                some = slice(start, start + _AT_ONCE)
                found, took_s = await self._readers.run(self._blocks.read, keys[some], memory, slots[some])
                came += [self._came(key, each) for key, each in zip(keys[some], found, strict=True)]
                self.stats.loaded(sum(each is not None for each in came[some]), took_s)
        except asyncio.CancelledError:
            if self._now() - began_at > _PATIENCE_S:  # that is why
                self._asked_again_at = self._now() + _PAUSE_S
            raise
        except KvoltError as error:
            self._out_of_reach(error)
            self.stats.failures["unread"] += len(keys) - len(came)
        return came + [None] * (len(keys) - len(came))

    def _came(self, key: BlockKey, found: Came) -> int | None:
        if isinstance(found, int):
            self._learn([key])
            return found
        self._miss(key)
        self.stats.failures["gone" if found is None else "corrupt"] += 1
        if found is not None:
            self._spoiled.add([key])
            log.error("block %s of the object tier is computed again: %s", key.hex(), found.reason)
        return None

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        """That they are there; they stay, since others use them."""
        self._known.forget(keys)
        if keys is None:
            self._absent.clear()
        return 0

    def take_changes(self) -> tuple[Change, ...]:
        return ()

    def check_integrity(self) -> None:
        assert not self._known.keys() & self._absent.keys(), "a block is there, and is not"


def _spread(start: int, end: int, most: int) -> list[int]:
    """So many places at most of these, the first among them, evenly spread."""
    count = min(end - start, most)
    return [start + number * (end - start) // count for number in range(count)]
