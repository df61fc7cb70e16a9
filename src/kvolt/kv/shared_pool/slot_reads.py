"""Blocks between slots of two processes' memories, by their transfer agents: offered by one, read by the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from kvolt.core.ids import BlockKey
from kvolt.kv.shared_pool.wire import Brought, Offered
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.agent import Offering, Operation, TransferAgent
from kvolt.transfer.memory.slabs import Numbers


def offer_slots(
    agent: TransferAgent, memory: SlotMemory, slots: Numbers, timeout_s: float
) -> tuple[list[Offering], tuple[Offered, ...]]:
    """What lies in these slots, which must stay as it is until the offerings are over."""
    offerings: list[Offering] = []
    told: list[Offered] = []
    try:
        for part, numbers, which in memory.by_part(slots):
            offering = agent.offer(part, numbers, timeout_s)
            offerings.append(offering)
            told.append(Offered(offering.ticket, tuple(which.tolist())))
    except BaseException:
        for offering in offerings:
            offering.cancel()  # nobody has a ticket
        raise
    return offerings, tuple(told)


async def withdraw(offerings: Sequence[Offering]) -> None:
    """Nobody reads them any more when this returns, cancelled or not."""
    for offering in offerings:
        offering.cancel()
    await _all_over(offerings)


async def read_slots(
    agent: TransferAgent,
    offered: Sequence[Offered],
    memory: SlotMemory,
    wanted: dict[int, int],
    timeout_s: float,
) -> None:
    """Blocks that were offered into slots: `wanted` has the slot of each place. Not checked: that is the caller's.
    KvoltError where not all came. No byte moves any more when this returns, cancelled or not."""
    for each in offered:
        pairs = [(at, wanted[place]) for at, place in enumerate(each.places) if place in wanted]
        if not pairs:
            agent.decline(each.ticket)
            continue
        positions = np.asarray([at for at, _ in pairs], dtype=np.int64)
        parts = list(memory.by_part(np.asarray([slot for _, slot in pairs], dtype=np.int64)))
        for number, (part, numbers, which) in enumerate(parts, 1):
            reading = agent.read(
                each.ticket,
                part,
                numbers,
                timeout_s,
                positions=positions[which],
                is_checked=False,
                is_last=number == len(parts),
            )
            try:
                await reading
            except asyncio.CancelledError:
                reading.cancel()
                await _all_over([reading])
                raise


async def read_brought(
    agent: TransferAgent,
    thread: TierThread,
    brought: Brought,
    memory: SlotMemory,
    slots: Numbers,
    keys: Sequence[BlockKey],
    timeout_s: float,
) -> list[int | None]:
    """What somebody brought of these blocks into slots; the checksum of each that came whole. As `read_slots`."""
    count = min(len(brought.checksums), len(keys))
    wanted = dict(enumerate(slots.tolist()[:count]))
    await read_slots(agent, brought.offered, memory, wanted, timeout_s)
    sums, _ = await thread.run(memory.checksums, slots[:count], keys[:count])
    came: list[int | None] = [None] * len(keys)
    for place, (found, due) in enumerate(zip(sums.tolist(), brought.checksums, strict=False)):
        if found == due:
            came[place] = due
    return came


async def _all_over(operations: Sequence[Operation]) -> None:
    cancelled: asyncio.CancelledError | None = None
    for operation in operations:
        while True:
            try:
                await operation.over()
                break
            except asyncio.CancelledError as error:
                cancelled = error  # the memory is still theirs
    if cancelled is not None:
        raise cancelled
