"""The half of the tier connector that runs in vLLM's workers: kvolt's tiers over vLLM's memory.

The tiers have a thread with a loop of their own; vLLM's thread gives orders and asks what is done. Each layer's memory
is to them what a rank's is elsewhere: a block has one piece in each. Blocks are held against their checksums as they
come up: one that is not what it was is a miss, with all that follow it, and vLLM computes them.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any

from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, Removed, Stored, Tier
from kvolt.engines.vllm.plugins.tier_messages import Move, Orders, TierFigures, Told, hash_of
from kvolt.engines.vllm.plugins.tier_settings import VllmTiers, lower_tiers, num_host_blocks
from kvolt.engines.vllm.plugins.tier_steps import Mark
from kvolt.kv.tiers.cache import Fetched, TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.transfer.memory.slabs import Slab

_START_S = 600.0
_STOP_S = 30.0
_FETCH_S = 10.0
_FENCE_S = 60.0
_TELL_S = 1.0


def slab_of(tensor: Any, num_blocks: int) -> Slab:
    """A layer's blocks, one after the other in its memory."""
    import torch

    # A kernel's block may be a part of vLLM's. Other layouts have blocks in pieces, which these copies do not know.
    block_bytes = tensor.shape[0] // num_blocks * tensor.stride(0) * tensor.element_size()
    num_bytes = num_blocks * block_bytes
    is_whole = tensor.shape[0] % num_blocks == 0 and tensor.stride(0) == max(tensor.stride())
    if not is_whole or num_bytes != tensor.numel() * tensor.element_size():
        raise ValueError(
            f"vLLM's KV of shape {tuple(tensor.shape)} with strides {tensor.stride()} has no blocks side by side: "
            "kvolt's tiers cannot be used with this attention backend and layout"
        )
    if tensor.device.type == "cpu":
        memory = memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")
        return Slab(memory, block_bytes)
    from kvolt.transfer.cuda.memory import CudaMemory

    view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (num_bytes,), (1,)
    )
    return Slab.on_device(CudaMemory(view), block_bytes)


class TierWorker:
    """See the module. `piece`: which of a block's pieces this worker has, for what outlives it."""

    def __init__(self, layers: Sequence[Any], num_blocks: int, settings: VllmTiers, piece: str) -> None:
        self._layers = layers  # their memory is ours to read and write for as long as this lives
        self._loads: dict[str, tuple[Future[Fetched], list[Move]]] = {}
        self._stores: dict[str, list[Future[int]]] = {}
        self._awaited: set[str] = set()
        self._era = 0
        """What was begun in another one is not kept."""
        self._failed_blocks: set[int] = set()
        self._held: dict[Tier, set[SequenceHash]] = {}
        """As told."""
        self._asking: Future[tuple[Sequence[Any], dict[Tier, TierFigures]]] | None = None
        self._has_news = True
        """Whether the tiers may have something to tell. What a disk has kept, at first."""
        self._began: Mark | None = None
        """Of the step that is computed."""
        self._timing: deque[tuple[int, Mark, Mark]] = deque()
        """Steps whose work the device has, and may not have done."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvolt-tiers", daemon=True)
        self._thread.start()
        slabs = [slab_of(each, num_blocks) for each in layers]
        shape = BlockShape.of(slabs)
        self._cache = TieredCache.over(
            slabs,
            num_host_blocks(settings, shape, num_blocks),
            lower_tiers(settings, shape, num_blocks, piece),
        )
        self._cache.host.on_change(self._on_news)
        self._run(self._cache.start()).result(_START_S)

    def _on_news(self) -> None:
        """A disk was written to, or the like. In the tiers' thread."""
        self._has_news = True

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._run(self._cache.close()).result(_STOP_S)
        self._run(self._loop.shutdown_default_executor()).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()

    # --- orders

    def begin(self, orders: Orders) -> None:
        """Before the step is prepared. vLLM has taken blocks from requests: what is under way from them must have been
        copied. What takes too long is not kept: others' bytes may have been copied, and the checksum would be right.
        All others' blocks stay theirs until `finished` tells of them, however many steps that takes."""
        under_way = [each for request_id in orders.preempted for each in self._stores.get(request_id, ())]
        if under_way and wait(under_way, _FENCE_S).not_done:
            self._era += 1
        self._began = Mark(self._layers[0]) if orders.timed is not None else None

    def obey(self, orders: Orders) -> None:
        """Around the step: what is to come, for others than compute in it."""
        if orders.clear:
            self._run(self._clear())  # before what follows: they have one loop
            self._has_news = True
        self._awaited |= orders.awaited
        for request_id, moves in orders.loads.items():
            numbers = [move.number for move in moves]
            fetching = self._cache.fetch(self._blocks(moves), numbers, _FETCH_S)
            self._loads[request_id] = (self._run(fetching), moves)

    def store(self, orders: Orders) -> None:
        """After the step: what it completed."""
        if not orders.stores and orders.timed is None:
            return
        mark = Mark(self._layers[0])
        if orders.timed is not None and self._began is not None:
            self._timing.append((orders.timed, self._began, mark))
        for request_id, moves in orders.stores.items():
            storing = self._store(moves, mark, self._era)
            self._stores.setdefault(request_id, []).append(self._run(storing))

    async def _store(self, moves: Sequence[Move], mark: Mark, era: int) -> int:
        if mark.is_waited_for:
            await asyncio.to_thread(mark.wait)
        numbers = [move.number for move in moves]
        return await self._cache.offload(self._blocks(moves), numbers, lambda: self._era == era)

    @staticmethod
    def _blocks(moves: Sequence[Move]) -> list[TierBlock]:
        return [
            TierBlock(
                move.key,
                hash_of(move.key),
                move.parent,
                None if move.parent is None else hash_of(move.parent),
                move.position,
            )
            for move in moves
        ]

    # --- what is done

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks may go, and those that have what was brought."""
        brought = {request_id for request_id, (fetching, _) in self._loads.items() if fetching.done()}
        self._has_news = self._has_news or bool(brought)
        for request_id in brought:
            fetching, moves = self._loads.pop(request_id)
            num_came = fetching.result().num_blocks if fetching.exception() is None else 0
            self._failed_blocks.update(move.number for move in moves[num_came:])
        for request_id in list(self._stores):
            left = [each for each in self._stores[request_id] if not each.done()]
            self._has_news = self._has_news or len(left) < len(self._stores[request_id])
            if left:
                self._stores[request_id] = left
            else:
                del self._stores[request_id]
        gone = {request_id for request_id in self._awaited if request_id not in self._stores}
        self._awaited -= gone
        return gone, brought

    def take_failed(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_told(self) -> Told | None:
        """What came to the tiers and went, since the last time, and how long steps took. If the tiers are slow to say,
        the next time."""
        told = Told(step_s=self._step_times())
        if self._has_news or self._asking is not None:
            self._take_news(told)
        return told if told != Told() else None

    def _take_news(self, told: Told) -> None:
        if self._asking is None:
            self._has_news = False  # before they are asked: what comes after is told the next time
            self._asking = self._run(self._news())
        try:
            changes, told.figures = self._asking.result(_TELL_S)
        except TimeoutError:
            return
        self._asking = None
        for change in changes:
            self._apply(change, told)

    def _step_times(self) -> dict[int, float]:
        times: dict[int, float] = {}
        while self._timing and self._timing[0][2].is_passed:
            number, began, ended = self._timing.popleft()
            times[number] = ended.seconds_from(began)
        return times

    def _apply(self, change: Any, told: Told) -> None:
        """Each block is told once, whatever is told twice to us: who adds them up counts workers by it."""
        match change:
            case Stored():
                held = self._held.setdefault(change.tier, set())
                new = [each for each in dict.fromkeys(change.sequence_hashes) if each not in held]
                held.update(new)
                told.stored.update((change.tier, each) for each in new)
            case Removed():
                held = self._held.setdefault(change.tier, set())
                gone = [each for each in change.sequence_hashes if each in held]
                held.difference_update(gone)
                told.removed.update((change.tier, each) for each in gone)
            case Cleared():
                for tier in [change.tier] if change.tier is not None else list(self._held):
                    told.removed.update((tier, each) for each in self._held.pop(tier, ()))

    async def _clear(self) -> None:
        self._cache.host.clear()

    async def _news(self) -> tuple[Sequence[Any], dict[Tier, TierFigures]]:
        host = self._cache.host
        figures = {
            tier: TierFigures(
                num_stored=stats.num_stored,
                stored_s=stats.stored_s,
                num_loaded=stats.num_loaded,
                num_dropped=host.num_dropped if tier is Tier.HOST else 0,
                loaded_s=stats.loaded_s,
                failures=dict(+stats.failures),
                block_s=host.block_s(tier),
                num_slots=host.size(tier)[1],
                block_bytes=host.shape.block_bytes,
            )
            for tier, stats in host.stats.items()
        }
        return host.take_changes(), figures
