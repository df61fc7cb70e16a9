"""Forwards KV events of vLLM's DP ranks into the engine's step outputs.

Owns the event feeds, the set of published blocks and each rank's latest load: a step output belongs to the DP rank that
its load names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvolt.core.card import EngineInfo
from kvolt.core.delta import StepOutput
from kvolt.core.kv_events import Cleared, KvChange
from kvolt.core.load import WorkerLoad
from kvolt.engines.external.held_blocks import HeldBlocks
from kvolt.engines.external.kv_feed import KvFeed
from kvolt.engines.kv_formats.schema import SourceEngine as EventsOf
from kvolt.engines.step_queue import StepQueue
from kvolt.runtime.tasks import TaskGroup

LoraName = Callable[[int | str], str | None]


class KvEventForwarder:
    """See the module."""

    def __init__(self, step_queue: StepQueue, lora_name: LoraName) -> None:
        self._step_queue = step_queue
        self._lora_name = lora_name
        self._feeds: list[KvFeed] = []
        self._blocks = HeldBlocks()
        self._ranks: tuple[int, ...] = ()
        self._num_blocks = 0
        """Capacity of each rank."""
        self._loads: dict[int, WorkerLoad] = {}
        """Latest load per rank."""

    @property
    def num_on_device(self) -> int:
        """Device blocks of all ranks."""
        return self._blocks.num_on_device

    def start(
        self,
        info: EngineInfo,
        sources: Mapping[int, tuple[str, str | None]],
        task_group: TaskGroup,
        has_disk: bool,
    ) -> None:
        """`sources`: endpoints per rank for events and replay. `has_disk`: events may be published before this
        connects."""
        self._ranks = info.dp_ranks
        self._num_blocks = info.capacity.kv_total_blocks
        for rank, (endpoint, replay) in sorted(sources.items()):
            feed = KvFeed(EventsOf.VLLM, info.block_size, endpoint, replay, lora_name=self._lora_name)
            self._feeds.append(feed)
            task_group.start(self._follow(feed, rank, has_disk), "kv events")

    async def _follow(self, feed: KvFeed, rank: int, has_disk: bool) -> None:
        if has_disk:
            for changes in await feed.read_missed():
                await self._on_changes(rank, changes)
        async for changes in feed.changes():
            await self._on_changes(rank, changes)

    async def _on_changes(self, rank: int, reported: tuple[KvChange, ...]) -> None:
        if changes := self._blocks.deduplicate(rank, reported):
            self._put(rank, changes)
            await self._step_queue.wait_for_space()

    def _put(self, rank: int, changes: tuple[KvChange, ...]) -> None:
        """Emit changes in a step output. Without a load it belongs to the first rank."""
        load = None
        if rank:
            idle = WorkerLoad(kv_total_blocks=self._num_blocks, dp_rank=rank)
            load = self._loads.get(rank, idle)
        self._step_queue.put(StepOutput(load=load, kv_changes=changes))

    def is_load_changed(self, load: WorkerLoad) -> bool:
        """Record a rank's load; returns whether it differs from the previous one. While peers read its blocks a rank
        makes empty steps at full speed, which need not be reported."""
        is_changed = load != self._loads.get(load.dp_rank)
        self._loads[load.dp_rank] = load
        return is_changed

    def clear(self) -> None:
        """Report all blocks as cleared now. vLLM reports it only with the next step of each rank; reporting it twice is
        harmless."""
        self._blocks.clear()
        for rank in self._ranks:
            self._put(rank, (Cleared(),))

    def close(self) -> None:
        for feed in self._feeds:
            feed.close()
