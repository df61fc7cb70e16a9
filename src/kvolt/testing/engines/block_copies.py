"""Prefills and copies of KV blocks between engines, shared by the conformance cases.

The cases copy the bytes themselves, like a transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from kvolt.core.errors import Unsupported
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import HeldKv, KvAddressable, KvAllocation, KvMovable, Prefill
from kvolt.testing.engines.harness import NotRun, Run, block_hashes, deadline_of
from kvolt.transfer.memory import block_bytes
from kvolt.transfer.memory.slabs import Slab


def prefill_of(run: Run) -> Prefill:
    engine = run.engine
    assert isinstance(engine, Prefill)
    return engine


async def prefilled(run: Run, request: Request) -> Handoff:
    async with asyncio.timeout(deadline_of(run.harness)):
        return await prefill_of(run).prefill(request)


def placed(run: Run) -> KvAddressable:
    engine = run.engine
    assert isinstance(engine, KvAddressable)
    return engine


def slabs_of(run: Run) -> tuple[Slab, ...]:
    """Slabs of all ranks, with layouts."""
    try:
        slabs = placed(run).kv_slabs()
    except Unsupported as error:
        raise NotRun(f"the test cannot access the blocks: {error.message}") from error
    layouts = [slab.layout for slab in slabs]
    ranks = [(layout.tp_rank, layout.tp_degree) for layout in layouts if layout is not None]
    assert slabs, "no slabs"
    assert ranks == [(rank, len(slabs)) for rank in range(len(slabs))], "not one slab for each rank, in order"
    assert len({slab.num_blocks for slab in slabs}) == 1, "ranks have different numbers of blocks"
    return slabs


async def computed(run: Run, request: Request) -> tuple[Handoff, HeldKv]:
    """Prefill a request; return its handoff and its held blocks."""
    handoff = await prefilled(run, request)
    held = await placed(run).held_kv(request.request_id)
    assert list(held.hashes) == block_hashes(request, run.info.block_size), (
        "the full blocks have wrong hashes"
    )
    assert len(held.blocks) == len(set(held.blocks)) == len(held.keys) == len(held.hashes)
    if isinstance(run.engine, KvMovable):
        assert held.keys == run.engine.kv_keys(request)
    return handoff, held


def copy_blocks(source: Run, held: HeldKv, target: Run, allocation: KvAllocation) -> None:
    """Copy the bytes of the allocated blocks."""
    blocks = held.blocks[allocation.num_present : allocation.num_present + len(allocation.blocks)]
    for remote, local in zip(slabs_of(source), slabs_of(target), strict=True):
        assert remote.layout == local.layout
        block_bytes.copy(
            local.memory,
            local.pieces(local.numbers(allocation.blocks)).offsets,
            remote.memory,
            remote.pieces(remote.numbers(blocks)).offsets,
            local.block_bytes,
        )


def contents(run: Run, blocks: Sequence[int]) -> list[bytes]:
    return [
        bytes(slab.memory[offset:][: slab.block_bytes])
        for slab in slabs_of(run)
        for offset in slab.numbers(blocks) * slab.block_bytes
    ]


async def move(source: Run, target: Run, request: Request, *, keep: bool = False) -> Request:
    """Prefill at the source, copy the blocks to the target, and return the request with its handoff.

    `keep` keeps the blocks for this request.
    """
    handoff, held = await computed(source, request)
    allocation = await placed(target).allocate_kv(held.keys, held.hashes)
    if allocation.blocks:
        copy_blocks(source, held, target, allocation)
        keep_for = request.request_id if keep else None
        await placed(target).commit_kv(allocation, len(allocation.blocks), keep_for)
    await prefill_of(source).release_prefill(request.request_id)
    return replace(request, handoff=handoff)
