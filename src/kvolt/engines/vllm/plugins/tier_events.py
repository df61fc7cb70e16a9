"""TierEvents: what routers are told of the blocks in a vLLM's tiers, each tier once.

Owns what was told and what is to be. A block is told by its tokens, which only a request knows: it is described when
it is ordered down or found, or by what was kept beside the disk (`tier_names`). One that nobody has described is not
told. Knows none of vLLM's events: `tier_connector` makes them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Tier
from kvolt.engines.vllm.plugins.tier_names import Described, NamesFile

_MOST_EXPECTED = 1 << 16
"""Blocks that are described and have not come: some never do."""
_AT_ONCE = 4096
"""Blocks told with one step. A disk may have a million when a vLLM starts."""


class Came(NamedTuple):
    """Blocks one below the other."""

    tier: Tier
    blocks: list[Described]


class Went(NamedTuple):
    tier: Tier
    names: list[bytes]


class TierEvents:
    """See the module. `names`: where there is a disk."""

    def __init__(self, names: NamesFile | None = None) -> None:
        self._names = names
        self._there: dict[Tier, set[SequenceHash]] = {}
        self._told: dict[Tier, set[SequenceHash]] = {}
        self._described: dict[SequenceHash, Described] = {}
        """Of those that are there, or are told to be."""
        self._expected: OrderedDict[SequenceHash, Described] = OrderedDict()
        self._recalled = {} if names is None else names.read()
        """As it was kept. Some of those blocks may not be found any more."""
        self._due: dict[tuple[Tier, SequenceHash], None] = {}
        self._ready: deque[Came | Went] = deque()

    def knows(self, number: SequenceHash) -> bool:
        """Whether it need not be described."""
        return number in self._described or number in self._expected

    def describe(self, described: Described) -> None:
        number = SequenceHash(described.number)
        tiers = [tier for tier, there in self._there.items() if number in there]
        if not tiers:
            self._expected[number] = described
            while len(self._expected) > _MOST_EXPECTED:
                self._expected.popitem(last=False)
            return
        self._described[number] = described
        for tier in tiers:
            self._due[tier, number] = None
            self._keep(tier, described)

    def moved(self, tier: Tier, number: SequenceHash, *, is_there: bool) -> None:
        """It came to a tier, or went."""
        there = self._there.setdefault(tier, set())
        self._due[tier, number] = None
        if not is_there:
            there.discard(number)
            return
        there.add(number)
        described = self._described.get(number)
        if described is None:
            described = self._expected.pop(number, None) or self._recalled.pop(number, None)
        if described is not None:
            self._described[number] = described
            self._keep(tier, described)

    def _keep(self, tier: Tier, described: Described) -> None:
        if tier is Tier.DISK and self._names is not None:
            self._names.keep(described)

    def settle(self) -> None:
        """After blocks have moved: what is to outlive us is written."""
        if self._names is None:
            return
        on_disk = self._there.get(Tier.DISK, set())
        # A worker tells all that its disk had at once, and what all have told of is there: until one block is, another
        # worker has yet to tell, and all that is recalled may be found.
        if on_disk and self._names.is_long(len(on_disk)):
            self._recalled.clear()
            self._names.rewrite(self._described[number] for number in on_disk if number in self._described)
        self._names.flush()

    def close(self) -> None:
        if self._names is not None:
            self._names.close()

    @property
    def is_due(self) -> bool:
        return bool(self._due or self._ready)

    def take(self) -> list[Came | Went]:
        """What is to be told now. Not all, where that is very much: there is more then (`is_due`)."""
        if self._due:
            self._ready.extend(self._changes())
        taken: list[Came | Went] = []
        num_blocks = 0
        while self._ready and num_blocks < _AT_ONCE:
            change = self._ready.popleft()
            num_blocks += len(change[1])
            taken.append(change)
        return taken

    def _changes(self) -> Iterator[Came | Went]:
        """What came first: of a block that goes from one tier to another who listens must not lose the name."""
        due, self._due = self._due, {}
        came: dict[Tier, list[Described]] = {}
        went: dict[Tier, list[SequenceHash]] = {}
        for tier, number in due:
            told = self._told.setdefault(tier, set())
            is_there = number in self._there.get(tier, ())
            if is_there and number not in told and number in self._described:
                told.add(number)
                came.setdefault(tier, []).append(self._described[number])
            elif not is_there and number in told:
                told.discard(number)
                went.setdefault(tier, []).append(number)
        for tier, blocks in came.items():
            for run in _runs(blocks):
                yield Came(tier, run)
        for tier, numbers in went.items():
            yield Went(tier, [self._described[number].name for number in numbers])
        for _, number in due:
            if not any(number in there for there in self._there.values()):
                self._described.pop(number, None)


def _runs(blocks: Sequence[Described]) -> Iterator[list[Described]]:
    """Blocks one below the other, none before the one that it follows."""
    names = {block.name for block in blocks}
    below: dict[bytes | None, list[Described]] = {}
    for block in blocks:
        if block.parent in names:
            below.setdefault(block.parent, []).append(block)
    heads = [block for block in reversed(blocks) if block.parent not in names]
    while heads:
        run = [heads.pop()]
        while children := below.pop(run[-1].name, None):
            run.append(children[0])
            heads.extend(_all_but_first(children))
        yield run


def _all_but_first(children: Sequence[Described]) -> Iterable[Described]:
    return reversed(children[1:])
