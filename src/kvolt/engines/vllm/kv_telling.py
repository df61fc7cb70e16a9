"""KvTelling: what vLLM's ranks say of their blocks, on its way to who reads the engine's steps.

Owns the feeds by which it comes, the blocks that were told, and each rank's latest load, since a step is of the rank
that its load names. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvolt.core.card import EngineInfo
from kvolt.core.delta import StepOutput
from kvolt.core.kv_events import Cleared, KvChange
from kvolt.core.load import WorkerLoad
from kvolt.engines.external.held_blocks import HeldBlocks
from kvolt.engines.external.kv_feed import KvFeed
from kvolt.engines.kv_formats.schema import Engine as EventsOf
from kvolt.engines.unread_steps import UnreadSteps
from kvolt.runtime.tasks import Crew

LoraName = Callable[[int | str], str | None]


class KvTelling:
    """See the module. `unread`: where steps wait to be read."""

    def __init__(self, unread: UnreadSteps, lora_name: LoraName) -> None:
        self._unread = unread
        self._lora_name = lora_name
        self._feeds: list[KvFeed] = []
        self._blocks = HeldBlocks()
        self._ranks: tuple[int, ...] = ()
        self._num_blocks = 0
        """That each rank can hold."""
        self._loads: dict[int, WorkerLoad] = {}
        """Of each rank the latest."""

    @property
    def num_on_device(self) -> int:
        """Blocks, of all ranks."""
        return self._blocks.num_on_device

    @property
    def num_heard(self) -> int:
        """Messages, of all ranks."""
        return sum(feed.num_batches for feed in self._feeds)

    def begin(
        self, info: EngineInfo, sources: Mapping[int, tuple[str, str | None]], crew: Crew, has_disk: bool
    ) -> None:
        """`sources`: where each rank tells of its blocks, and repeats what was missed. `has_disk`: it tells what it has
        kept before anybody listens."""
        self._ranks = info.dp_ranks
        self._num_blocks = info.capacity.kv_total_blocks
        for rank, (endpoint, replay) in sorted(sources.items()):
            feed = KvFeed(EventsOf.VLLM, info.block_size, endpoint, replay, lora_name=self._lora_name)
            self._feeds.append(feed)
            crew.start(self._follow(feed, rank, has_disk), "kv events")

    async def _follow(self, feed: KvFeed, rank: int, has_disk: bool) -> None:
        if has_disk:
            for told in await feed.catch_up():
                await self._hear(rank, told)
        async for told in feed.changes():
            await self._hear(rank, told)

    async def _hear(self, rank: int, told: tuple[KvChange, ...]) -> None:
        if changes := self._blocks.once(rank, told):
            self._tell(rank, changes)
            await self._unread.room()

    def _tell(self, rank: int, changes: tuple[KvChange, ...]) -> None:
        """Of the first rank no load need say so."""
        load = None
        if rank:
            nothing = WorkerLoad(kv_total_blocks=self._num_blocks, dp_rank=rank)
            load = self._loads.get(rank, nothing)
        self._unread.put(StepOutput(load=load, kv_changes=changes))

    def is_news(self, load: WorkerLoad) -> bool:
        """Whether a rank's load is another than before. While others fetch from it, it makes steps as fast as it can,
        in which nothing happens."""
        is_news = load != self._loads.get(load.dp_rank)
        self._loads[load.dp_rank] = load
        return is_news

    def clear(self) -> None:
        """All is forgotten. vLLM tells of it with the next step of each rank, whenever that comes; to be told twice
        does no harm."""
        self._blocks.clear()
        for rank in self._ranks:
            self._tell(rank, (Cleared(),))

    def close(self) -> None:
        for feed in self._feeds:
            feed.close()
