"""Transfers blocks between slots of two processes through transfer agents: one offers, the other reads."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import numpy as np

from kvolt.core.ids import BlockKey
from kvolt.core.request import READER_KEY_BYTES, reader_proof
from kvolt.kv.shared_pool.wire import FetchResult, OfferedBlocks
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.agent import OfferHandle, Operation, TransferAgent
from kvolt.transfer.memory.slabs import Numbers
from kvolt.transfer.reads.wire import bind_ticket


def offer_slots(
    agent: TransferAgent, memory: SlotMemory, slots: Numbers, timeout_s: float, reader: str = ""
) -> tuple[list[OfferHandle], tuple[OfferedBlocks, ...]]:
    """Offer the blocks in these slots, which must not change until the offers are done.

    `reader`: identity of the process that alone may read them; empty: any with the tickets.
    """
    key = secrets.token_bytes(READER_KEY_BYTES) if reader else b""
    proof = reader_proof(key, reader) if reader else b""
    offers: list[OfferHandle] = []
    offered: list[OfferedBlocks] = []
    try:
        for part, numbers, which in memory.by_part(slots):
            offer = agent.offer(part, numbers, timeout_s, reader_key=key)
            offers.append(offer)
            offered.append(OfferedBlocks(bind_ticket(offer.ticket, proof), tuple(which.tolist())))
    except BaseException:
        for offer in offers:
            offer.cancel()  # the tickets were not published
        raise
    return offers, tuple(offered)


async def withdraw_offers(offers: Sequence[OfferHandle]) -> None:
    """Withdraw offers; no peer reads them once this returns, even if cancelled."""
    for offer in offers:
        offer.cancel()
    await _wait_done(offers)


async def read_slots(
    agent: TransferAgent,
    offered: Sequence[OfferedBlocks],
    memory: SlotMemory,
    slot_by_index: dict[int, int],
    timeout_s: float,
) -> None:
    """Read offered blocks into slots; `slot_by_index` has the slot per block index. The caller verifies checksums.

    KvoltError if a read fails. No byte moves once this returns, even if cancelled.
    """
    for each in offered:
        pairs = [(at, slot_by_index[index]) for at, index in enumerate(each.places) if index in slot_by_index]
        if not pairs:
            agent.decline(each.ticket)
            continue
        positions = np.asarray([at for at, _ in pairs], dtype=np.int64)
        parts = list(memory.by_part(np.asarray([slot for _, slot in pairs], dtype=np.int64)))
        for number, (part, numbers, which) in enumerate(parts, 1):
            read = agent.read(
                each.ticket,
                part,
                numbers,
                timeout_s,
                positions=positions[which],
                is_checked=False,
                is_last=number == len(parts),
            )
            try:
                await read
            except asyncio.CancelledError:
                read.cancel()
                await _wait_done([read])
                raise


async def read_verified(
    agent: TransferAgent,
    thread: TierThread,
    result: FetchResult,
    memory: SlotMemory,
    slots: Numbers,
    keys: Sequence[BlockKey],
    timeout_s: float,
) -> list[int | None]:
    """Read fetched blocks into slots, like `read_slots`; return the checksum of each intact block."""
    count = min(len(result.checksums), len(keys))
    slot_by_index = dict(enumerate(slots.tolist()[:count]))
    await read_slots(agent, result.offered, memory, slot_by_index, timeout_s)
    sums, _ = await thread.run(memory.checksums, slots[:count], keys[:count])
    checksums: list[int | None] = [None] * len(keys)
    for index, (actual, expected) in enumerate(zip(sums.tolist(), result.checksums, strict=False)):
        if actual == expected:
            checksums[index] = expected
    return checksums


async def _wait_done(operations: Sequence[Operation]) -> None:
    cancelled: asyncio.CancelledError | None = None
    for operation in operations:
        while True:
            try:
                await operation.wait_done()
                break
            except asyncio.CancelledError as error:
                cancelled = error  # keep waiting: the memory is still in use
    if cancelled is not None:
        raise cancelled
