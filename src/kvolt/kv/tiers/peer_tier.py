"""PeerTier: what other workers' tiers have, as a tier below a worker's own host memory.

Knows only what requests say: which worker is held to have how much of a prompt (`kv_sources`). Nothing is written
there. A worker that has gone, or has let the blocks go, is a miss, and is left alone for a while.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np

from kvolt.core.errors import InvalidRequest, KvoltError, Overloaded
from kvolt.core.ids import BlockKey, InstanceId
from kvolt.core.kv_events import Tier
from kvolt.core.request import KvSource
from kvolt.kv.changes import Change
from kvolt.kv.shared_pool.slot_reads import read_brought
from kvolt.kv.shared_pool.wire import Bring, Brought, WireBlock
from kvolt.kv.tiers.lower_tier import TierStats
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_READ_S = 3.0
"""For a batch of blocks to come: to compute them would have taken less."""
_PATIENCE_S = 1.0
"""A read that is given up after this was too slow; before, somebody did not want it any more."""
_ALONE_S = 10.0
"""For which a worker is not asked again that did not answer."""
_UNLIKE_S = 600.0
"""For which one is not whose blocks have another shape."""
_MOST_KNOWN = 1 << 16

AskPeer = Callable[[InstanceId, Bring], AbstractAsyncContextManager[Brought]]
"""Blocks of another worker, which may be read as long as this is open. KvoltError where it does not answer."""


class PeerTier:
    """A `LowerTier`. Has nothing before `connect`."""

    tier = Tier.PEER
    look_s: float | None = None
    num_slots = None
    has_chores = False

    def __init__(self, agent: TransferAgent, now: Callable[[], float]) -> None:
        """`agent`: the process's, which somebody else closes."""
        self._agent = agent
        self._now = now
        self._ask: AskPeer | None = None
        self._me = InstanceId("")
        self._places: OrderedDict[BlockKey, InstanceId] = OrderedDict()
        """Who is held to have a block. The oldest go."""
        self._alone_until: dict[InstanceId, float] = {}
        self._thread = TierThread("kv-peer")
        self.stats = TierStats()

    def connect(self, ask: AskPeer, me: InstanceId) -> None:
        """How others are asked, and who need not be."""
        self._ask, self._me = ask, me

    async def start(self) -> None: ...

    async def close(self) -> None:
        await self._thread.close()

    def __len__(self) -> int:
        return len(self._places)

    def expect(self, keys: Sequence[BlockKey], sources: Sequence[KvSource]) -> None:
        """A request says who has the first of its blocks."""
        now = self._now()
        for source in sources:
            if source.instance == self._me or self._alone_until.get(source.instance, -math.inf) > now:
                continue
            for key in keys[: max(source.num_blocks, 0)]:
                self._places[key] = source.instance
                self._places.move_to_end(key)
        while len(self._places) > _MOST_KNOWN:
            self._places.popitem(last=False)

    def has(self, key: BlockKey) -> bool:
        return self._ask is not None and key in self._places

    def knows(self, key: BlockKey) -> bool:
        """None is ever offered."""
        return True

    async def look(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        """There is no more than requests say."""

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        """Others' tiers are filled by others."""

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        came: list[int | None] = [None] * len(blocks)
        by_place: dict[InstanceId, list[int]] = {}
        for index, block in enumerate(blocks):
            place = self._places.get(block.key)
            if place is not None:  # forgotten meanwhile
                by_place.setdefault(place, []).append(index)
        for place, indexes in by_place.items():
            some = [blocks[index] for index in indexes]
            found = await self._read_from(place, some, memory, slots[np.asarray(indexes)])
            for index, checksum in zip(indexes, found, strict=True):
                came[index] = checksum
        # Also those that came: the next request says anew who has them, and by then that one may have let them go.
        self.forget([block.key for block in blocks])
        return came

    async def _read_from(
        self, place: InstanceId, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers
    ) -> list[int | None]:
        assert self._ask is not None
        keys = [block.key for block in blocks]
        began_at = time.perf_counter()
        try:
            await self._thread.run(memory.reach, int(slots.max()) + 1)
            bring = Bring(tuple(map(WireBlock.of, blocks)), memory.shape)
            async with asyncio.timeout(_READ_S), self._ask(place, bring) as brought:
                came = await read_brought(self._agent, self._thread, brought, memory, slots, keys, _READ_S)
        except asyncio.CancelledError:
            if time.perf_counter() - began_at > _PATIENCE_S:  # that is why
                self._leave_alone(place, _ALONE_S)
            raise
        except (KvoltError, TimeoutError) as error:
            told = error.message if isinstance(error, KvoltError) else f"they took more than {_READ_S:g} s"
            log.warning("blocks did not come from worker %s: %s", place, told)
            self.stats.failures["unread"] += len(keys)
            if not isinstance(error, Overloaded):  # that one answers, and may have time for the next
                self._leave_alone(place, _UNLIKE_S if isinstance(error, InvalidRequest) else _ALONE_S)
            return [None] * len(keys)
        num_came = sum(each is not None for each in came)
        num_bad = min(len(brought.checksums), len(keys)) - num_came
        if num_bad:
            log.error("%d blocks of worker %s are not what they were", num_bad, place)
        self.stats.failures["corrupt"] += num_bad
        self.stats.failures["gone"] += len(keys) - num_came - num_bad
        self.stats.loaded(num_came, time.perf_counter() - began_at)
        return came

    def _leave_alone(self, place: InstanceId, for_s: float) -> None:
        now = self._now()
        self._alone_until = {each: until for each, until in self._alone_until.items() if until > now}
        self._alone_until[place] = now + for_s
        self.forget([key for key, known in self._places.items() if known == place])

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        """That others have them; they keep them."""
        if keys is None:
            self._places.clear()
        else:
            for key in keys:
                self._places.pop(key, None)
        return 0

    def take_changes(self) -> tuple[Change, ...]:
        """Who has them tells of them."""
        return ()

    def check_integrity(self) -> None:
        """Others have the books."""
