"""Worker half of the tier connector: kvolt's tiers over vLLM's KV memory.

The tiers run in a thread with its own event loop; vLLM's thread sends commands and polls for results. Each layer is a
slab, so that a block has one piece per layer. Loaded blocks are verified by checksum: a corrupt block and all blocks
after it are cache misses, which vLLM computes.
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
from kvolt.engines.vllm.arguments import VllmTiers, lower_tiers, num_host_blocks
from kvolt.engines.vllm.plugins.tier_messages import (
    BlockMove,
    TierCommands,
    TierUpdate,
    hash_of,
)
from kvolt.engines.vllm.plugins.tier_stats import TierCounters
from kvolt.kv.tiers.cache import OnboardResult, TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.runtime.clock import SystemClock
from kvolt.transfer.memory.slabs import Slab

_START_S = 600.0
_STOP_S = 30.0
_FETCH_S = 10.0
_FENCE_S = 60.0
_QUERY_S = 1.0


_clock = SystemClock()


class Mark:
    """Point in the device's work queue, to measure steps. On a CPU all work before it is done already."""

    def __init__(self, tensor: Any) -> None:
        """`tensor`: memory on the device."""
        self._at = _clock.monotonic()
        self._event: Any = None
        if tensor.device.type != "cpu":
            import torch

            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    @property
    def needs_wait(self) -> bool:
        """Whether `wait` must be called before the work is used."""
        return self._event is not None

    def wait(self) -> None:
        """Block until the device has reached it. Not for vLLM's main thread, which prepares the next step."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_from(self, start: Mark) -> float:
        """Seconds between two points that the device has passed."""
        if self._event is not None:
            return float(start._event.elapsed_time(self._event)) / 1e3
        return self._at - start._at


def slab_of(tensor: Any, num_blocks: int) -> Slab:
    """The slab of a layer: its blocks, contiguous in memory."""
    import torch

    # A kernel's block may be a part of vLLM's. Layouts with non-contiguous blocks are not supported.
    block_bytes = tensor.shape[0] // num_blocks * tensor.stride(0) * tensor.element_size()
    num_bytes = num_blocks * block_bytes
    is_whole = tensor.shape[0] % num_blocks == 0 and tensor.stride(0) == max(tensor.stride())
    if not is_whole or num_bytes != tensor.numel() * tensor.element_size():
        raise ValueError(
            f"vLLM's KV of shape {tuple(tensor.shape)} with strides {tensor.stride()} has non-contiguous blocks: "
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
    """See the module. `piece`: name of this worker's piece of each block, for files on disk."""

    def __init__(self, layers: Sequence[Any], num_blocks: int, settings: VllmTiers, piece: str) -> None:
        self._layers = layers  # keeps their memory alive
        self._loads: dict[str, tuple[Future[OnboardResult], list[BlockMove]]] = {}
        self._stores: dict[str, list[Future[int]]] = {}
        self._awaited: set[str] = set()
        self._era = 0
        """Stores started in an earlier era are dropped."""
        self._failed_blocks: set[int] = set()
        self._held: dict[Tier, set[SequenceHash]] = {}
        """Blocks reported so far, by tier."""
        self._change_query: Future[tuple[Sequence[Any], dict[Tier, TierCounters]]] | None = None
        self._has_changes = True
        """Whether the tiers may have unreported changes; initially the content of the disk."""
        self._step_start: Mark | None = None
        """Start of the current step."""
        self._timing: deque[tuple[int, Mark, Mark]] = deque()
        """Steps submitted to the device that may not be done."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvolt-tiers", daemon=True)
        self._thread.start()
        slabs = [slab_of(each, num_blocks) for each in layers]
        shape = BlockShape.of(slabs)
        self._cache = TieredCache.for_slabs(
            slabs,
            num_host_blocks(settings, shape, num_blocks),
            lower_tiers(settings, shape, num_blocks, piece),
        )
        self._cache.host.set_on_change(self._on_change)
        self._run(self._cache.start()).result(_START_S)

    def _on_change(self) -> None:
        """Called in the tiers' thread, for example after a write to disk."""
        self._has_changes = True

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._run(self._cache.close()).result(_STOP_S)
        self._run(self._loop.shutdown_default_executor()).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()

    # --- commands

    def begin_step(self, commands: TierCommands) -> None:
        """Before the step is prepared: wait for copies from blocks of preempted requests, which vLLM reuses.

        Copies that take too long are dropped: they may contain bytes of other requests, under a valid checksum. Blocks
        of other requests stay allocated until `take_finished` returns them."""
        in_flight = [each for request_id in commands.preempted for each in self._stores.get(request_id, ())]
        if in_flight and wait(in_flight, _FENCE_S).not_done:
            self._era += 1
        self._step_start = Mark(self._layers[0]) if commands.timed is not None else None

    def start_loads(self, commands: TierCommands) -> None:
        """At the step's start: load blocks for requests that are not part of it."""
        if commands.clear:
            self._run(self._clear())  # runs before the following commands: they share one loop
            self._has_changes = True
        self._awaited |= commands.awaited
        for request_id, moves in commands.loads.items():
            numbers = [move.number for move in moves]
            fetching = self._cache.onboard(self._blocks(moves), numbers, _FETCH_S)
            self._loads[request_id] = (self._run(fetching), moves)

    def start_stores(self, commands: TierCommands) -> None:
        """After the step: offload the blocks that it completed."""
        if not commands.stores and commands.timed is None:
            return
        mark = Mark(self._layers[0])
        if commands.timed is not None and self._step_start is not None:
            self._timing.append((commands.timed, self._step_start, mark))
        for request_id, moves in commands.stores.items():
            storing = self._store(moves, mark, self._era)
            self._stores.setdefault(request_id, []).append(self._run(storing))

    async def _store(self, moves: Sequence[BlockMove], mark: Mark, era: int) -> int:
        if mark.needs_wait:
            await asyncio.to_thread(mark.wait)
        numbers = [move.number for move in moves]
        return await self._cache.offload(self._blocks(moves), numbers, lambda: self._era == era)

    @staticmethod
    def _blocks(moves: Sequence[BlockMove]) -> list[TierBlock]:
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

    # --- results

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks may be released, and requests whose loads are done."""
        loaded = {request_id for request_id, (fetching, _) in self._loads.items() if fetching.done()}
        self._has_changes = self._has_changes or bool(loaded)
        for request_id in loaded:
            fetching, moves = self._loads.pop(request_id)
            num_loaded = fetching.result().num_blocks if fetching.exception() is None else 0
            self._failed_blocks.update(move.number for move in moves[num_loaded:])
        for request_id in list(self._stores):
            left = [each for each in self._stores[request_id] if not each.done()]
            self._has_changes = self._has_changes or len(left) < len(self._stores[request_id])
            if left:
                self._stores[request_id] = left
            else:
                del self._stores[request_id]
        released = {request_id for request_id in self._awaited if request_id not in self._stores}
        self._awaited -= released
        return released, loaded

    def take_failed(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_update(self) -> TierUpdate | None:
        """Changes of the tiers and step times since the last call. If the tiers answer late, the next call returns
        them."""
        update = TierUpdate(step_s=self._step_times())
        if self._has_changes or self._change_query is not None:
            self._take_changes(update)
        return update if update != TierUpdate() else None

    def _take_changes(self, update: TierUpdate) -> None:
        if self._change_query is None:
            self._has_changes = False  # before the query: later changes are reported by the next one
            self._change_query = self._run(self._read_changes())
        try:
            changes, update.counters = self._change_query.result(_QUERY_S)
        except TimeoutError:
            return
        self._change_query = None
        for change in changes:
            self._apply(change, update)

    def _step_times(self) -> dict[int, float]:
        times: dict[int, float] = {}
        while self._timing and self._timing[0][2].is_passed:
            number, start, end = self._timing.popleft()
            times[number] = end.seconds_from(start)
        return times

    def _apply(self, change: Any, update: TierUpdate) -> None:
        """Report each block once, even if the tiers report it twice: the scheduler counts workers by it."""
        match change:
            case Stored():
                held = self._held.setdefault(change.tier, set())
                new = [each for each in dict.fromkeys(change.sequence_hashes) if each not in held]
                held.update(new)
                update.stored.update((change.tier, each) for each in new)
            case Removed():
                held = self._held.setdefault(change.tier, set())
                removed = [each for each in change.sequence_hashes if each in held]
                held.difference_update(removed)
                update.removed.update((change.tier, each) for each in removed)
            case Cleared():
                for tier in [change.tier] if change.tier is not None else list(self._held):
                    update.removed.update((tier, each) for each in self._held.pop(tier, ()))

    async def _clear(self) -> None:
        self._cache.host.clear()

    async def _read_changes(self) -> tuple[Sequence[Any], dict[Tier, TierCounters]]:
        host = self._cache.host
        counters = {
            tier: TierCounters(
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
        return host.take_changes(), counters
