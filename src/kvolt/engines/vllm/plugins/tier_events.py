"""KV events of the blocks in vLLM's tiers.

Events name blocks by their tokens, which only requests have: a block is described when it is offloaded or looked up, or
from the file beside the disk tier (`tier_names`). Blocks without a description are not published. `tier_connector`
converts the events to vLLM's format.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Tier
from kvolt.engines.vllm.plugins.tier_names import BlockDescription, NamesFile

_MAX_EXPECTED = 1 << 16
"""Descriptions of blocks that are not stored yet; some never are."""
_MAX_PER_STEP = 4096
"""Blocks published per step. A disk may have a million at start."""


class StoredRun(NamedTuple):
    """Blocks that follow each other."""

    tier: Tier
    blocks: list[BlockDescription]


class RemovedRun(NamedTuple):
    tier: Tier
    names: list[bytes]


class TierEvents:
    """See the module. `names`: with a disk tier."""

    def __init__(self, names: NamesFile | None = None) -> None:
        self._names = names
        self._stored: dict[Tier, set[SequenceHash]] = {}
        self._published: dict[Tier, set[SequenceHash]] = {}
        self._described: dict[SequenceHash, BlockDescription] = {}
        """Descriptions of blocks that are stored or published as such."""
        self._expected: OrderedDict[SequenceHash, BlockDescription] = OrderedDict()
        self._restored = {} if names is None else names.read()
        """Descriptions read from the file. Some of these blocks may not exist any more."""
        self._due: dict[tuple[Tier, SequenceHash], None] = {}
        self._ready: deque[StoredRun | RemovedRun] = deque()

    def is_described(self, number: SequenceHash) -> bool:
        """Whether the block has a description."""
        return number in self._described or number in self._expected

    def describe(self, described: BlockDescription) -> None:
        number = SequenceHash(described.number)
        tiers = [tier for tier, stored in self._stored.items() if number in stored]
        if not tiers:
            self._expected[number] = described
            while len(self._expected) > _MAX_EXPECTED:
                self._expected.popitem(last=False)
            return
        self._described[number] = described
        for tier in tiers:
            self._due[tier, number] = None
            self._keep(tier, described)

    def on_moved(self, tier: Tier, number: SequenceHash, *, is_stored: bool) -> None:
        """The block was stored in or removed from a tier."""
        stored = self._stored.setdefault(tier, set())
        self._due[tier, number] = None
        if not is_stored:
            stored.discard(number)
            return
        stored.add(number)
        described = self._described.get(number)
        if described is None:
            described = self._expected.pop(number, None) or self._restored.pop(number, None)
        if described is not None:
            self._described[number] = described
            self._keep(tier, described)

    def _keep(self, tier: Tier, described: BlockDescription) -> None:
        if tier is Tier.DISK and self._names is not None:
            self._names.keep(described)

    def flush(self) -> None:
        """Write pending descriptions to the file. Call after `on_moved`."""
        if self._names is None:
            return
        on_disk = self._stored.get(Tier.DISK, set())
        # A worker reports the content of its disk at once, and a block counts once all workers have reported it: before
        # the first block counts, all restored descriptions may still be needed.
        if on_disk and self._names.is_long(len(on_disk)):
            self._restored.clear()
            self._names.rewrite(self._described[number] for number in on_disk if number in self._described)
        self._names.flush()

    def close(self) -> None:
        if self._names is not None:
            self._names.close()

    @property
    def is_due(self) -> bool:
        return bool(self._due or self._ready)

    def take_events(self) -> list[StoredRun | RemovedRun]:
        """Events to publish now, limited in size. If more are left, `is_due` is true."""
        if self._due:
            self._ready.extend(self._changes())
        events: list[StoredRun | RemovedRun] = []
        num_blocks = 0
        while self._ready and num_blocks < _MAX_PER_STEP:
            change = self._ready.popleft()
            num_blocks += len(change[1])
            events.append(change)
        return events

    def _changes(self) -> Iterator[StoredRun | RemovedRun]:
        """Stored blocks first, so that a block that moves between tiers stays known to subscribers."""
        due, self._due = self._due, {}
        stored: dict[Tier, list[BlockDescription]] = {}
        removed: dict[Tier, list[SequenceHash]] = {}
        for tier, number in due:
            published = self._published.setdefault(tier, set())
            is_stored = number in self._stored.get(tier, ())
            if is_stored and number not in published and number in self._described:
                published.add(number)
                stored.setdefault(tier, []).append(self._described[number])
            elif not is_stored and number in published:
                published.discard(number)
                removed.setdefault(tier, []).append(number)
        for tier, blocks in stored.items():
            for run in _runs(blocks):
                yield StoredRun(tier, run)
        for tier, numbers in removed.items():
            yield RemovedRun(tier, [self._described[number].name for number in numbers])
        for _, number in due:
            if not any(number in each for each in self._stored.values()):
                self._described.pop(number, None)


def _runs(blocks: Sequence[BlockDescription]) -> Iterator[list[BlockDescription]]:
    """Group blocks into runs; parents come before children."""
    names = {block.name for block in blocks}
    below: dict[bytes | None, list[BlockDescription]] = {}
    for block in blocks:
        if block.parent in names:
            below.setdefault(block.parent, []).append(block)
    heads = [block for block in reversed(blocks) if block.parent not in names]
    while heads:
        run = [heads.pop()]
        while children := below.pop(run[-1].name, None):
            run.append(children[0])
            heads.extend(reversed(children[1:]))
        yield run
