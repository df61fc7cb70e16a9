"""KvTranslator: TensorRT-LLM's KV events as ours: its own names of blocks become SequenceHashes, by their tokens.

As `kv_formats.translator` does for others: a map from its names to ours for the blocks that it holds. What cannot be
named is left out and counted: an unknown parent, a block that is not full, one of media, layers with another window.
A block is told once. TensorRT-LLM's buffer of events drops the oldest when it is full, and leaves a hole in their
numbers: then all that was told is taken back. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvolt.core.errors import InvalidRequest
from kvolt.core.hashing import check_block_size, local_hashes, sequence_hashes
from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier
from kvolt.engines.kv_formats.trtllm_schema import (
    CreatedData,
    EngineHash,
    RemovedData,
    StoredBlock,
    StoredData,
    UpdatedData,
    event_of,
)
from kvolt.engines.kv_formats.trtllm_seeds import SeedBook

_TIERS = {0: Tier.DEVICE, 1: Tier.HOST}
"""Cache levels."""
MAX_NAMES = 1 << 19


@dataclass(slots=True)
class _Name:
    """One block in our words. The seed goes on to the blocks below."""

    sequence: SequenceHash
    parent: SequenceHash | None
    seed: int
    tier: Tier


class _Unnamed(Exception):
    """A block that cannot be named; the reason is its first argument."""


class KvTranslator:
    """See the module. `read` each event, in order."""

    def __init__(self, block_size: int, seeds: SeedBook, max_names: int = MAX_NAMES) -> None:
        self._block_size = check_block_size(block_size)
        self._seeds = seeds
        self._max_names = max_names
        self._names: dict[EngineHash, _Name] = {}
        """In order of being stored."""
        self._told: set[SequenceHash] = set()
        self._window: int | None = None
        """The widest: its layers need the whole prefix, or most of it."""
        self._next_id: int | None = None
        self.num_lost = 0
        """Events that were dropped before we asked for them."""
        self.skipped: Counter[str] = Counter()
        """Blocks (or events) that were left out, by reason."""

    def read(self, told: Any) -> list[KvChange]:
        event = event_of(told)
        if event is None:
            return self._skip("unreadable")
        changes = self._check_number(event.event_id)
        if isinstance(event.data, CreatedData):
            return changes + self._created(event.window_size)
        if self._window is None:
            self._window = event.window_size
        if event.window_size != self._window:
            return changes + self._skip("window")
        match event.data:
            case StoredData():
                return changes + self._stored(event.data)
            case RemovedData():
                return changes + self._removed(event.data.block_hashes)
            case UpdatedData():
                return changes + self._updated(event.data)
        return changes

    def forget(self, seeds: Collection[int]) -> list[KvChange]:
        """Of an adapter that is gone: TensorRT-LLM may keep its blocks, but nobody finds them any more."""
        self._seeds.forget(seeds)
        return self._removed(tuple(block for block, name in self._names.items() if name.seed in seeds))

    def _check_number(self, event_id: int) -> list[KvChange]:
        due, self._next_id = self._next_id, event_id + 1
        if due is None or event_id == due:
            return []
        self.num_lost += max(event_id - due, 0)
        return self._begin_anew()

    def _begin_anew(self) -> list[KvChange]:
        if not self._names:
            return []
        self._names.clear()
        self._told.clear()
        return [Cleared()]

    def _created(self, window: int | None) -> list[KvChange]:
        if window is None or (self._window is not None and window <= self._window):
            return []
        self._window = window
        return self._begin_anew()

    # --- stored

    def _stored(self, data: StoredData) -> list[KvChange]:
        parent: _Name | None = None
        if data.parent_hash is not None:
            parent = self._names.get(data.parent_hash)
            if parent is None:
                return self._skip("unknown_parent", len(data.blocks))
        changes: list[KvChange] = []
        run: list[_Name] = []
        above = parent
        for number, block in enumerate(data.blocks):
            known = self._names.get(block.block_hash)
            if known is not None:  # told before
                self._tell(changes, run, parent)
                parent = above = known
                continue
            try:
                name = self._name(block, above)
            except _Unnamed as reason:
                self._skip(str(reason))
                self._skip("below", len(data.blocks) - number - 1)
                break
            if run and name.tier is not run[-1].tier:
                self._tell(changes, run, parent)
                parent = above
            self._names[block.block_hash] = name
            self._told.add(name.sequence)
            run.append(name)
            above = name
        self._tell(changes, run, parent)
        return changes + self._forget_oldest()

    def _tell(self, changes: list[KvChange], run: list[_Name], parent: _Name | None) -> None:
        if run:
            above = parent.sequence if parent is not None else None
            changes.append(Stored.of([each.sequence for each in run], above, tier=run[0].tier))
            run.clear()

    def _name(self, block: StoredBlock, above: _Name | None) -> _Name:
        tier = _TIERS.get(block.cache_level)
        if tier is None:
            raise _Unnamed("level")
        if len(block.tokens) != self._block_size:
            raise _Unnamed("partial")
        if block.mm_keys or any(each.token_extra_id for each in block.tokens):
            raise _Unnamed("media")
        tokens = [each.token_id for each in block.tokens if isinstance(each.token_id, int)]
        if len(tokens) != self._block_size:
            raise _Unnamed("media")
        try:
            seed = above.seed if above is not None else self._seeds.find(block.block_hash, tokens)
            if seed is None:
                raise _Unnamed("whose")
            local = local_hashes(tokens, self._block_size, seed)
        except InvalidRequest:
            raise _Unnamed("tokens") from None
        parent = above.sequence if above is not None else None
        sequence = sequence_hashes(local, parent)[0]
        if sequence in self._told:  # by another name: one of the two is not what it was taken for
            raise _Unnamed("twice")
        return _Name(sequence, parent, seed, tier)

    def _forget_oldest(self) -> list[KvChange]:
        """What there is no room for is told as removed: its real end could not be told any more."""
        changes: list[KvChange] = []
        while len(self._names) > self._max_names:
            self.skipped["no_room"] += 1
            changes += self._removed((next(iter(self._names)),))
        return changes

    # --- removed, moved

    def _removed(self, blocks: tuple[EngineHash, ...]) -> list[KvChange]:
        gone: dict[Tier, list[SequenceHash]] = {}
        for block in blocks:
            name = self._names.pop(block, None)
            if name is None:
                self._skip("unknown_block")
                continue
            self._told.discard(name.sequence)
            gone.setdefault(name.tier, []).append(name.sequence)
        return [Removed.of(hashes, tier) for tier, hashes in gone.items()]

    def _updated(self, data: UpdatedData) -> list[KvChange]:
        """To another level of memory."""
        name = self._names.get(data.block_hash)
        if name is None or data.cache_level is None:
            return []
        tier = _TIERS.get(data.cache_level.new_value)
        if tier is None or (name.parent is not None and name.parent not in self._told):
            return self._removed((data.block_hash,))
        if tier is name.tier:
            return []
        old, name.tier = name.tier, tier
        return [Stored.of([name.sequence], name.parent, tier=tier), Removed.of([name.sequence], old)]

    # ---

    def _skip(self, reason: str, number: int = 1) -> list[KvChange]:
        if number:
            self.skipped[reason] += number
        return []
