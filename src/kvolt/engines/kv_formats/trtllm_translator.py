"""TrtllmTranslator: converts TensorRT-LLM's KV events to kvolt's, whose SequenceHashes are computed from the tokens.

Works like `kv_formats.translator`. Blocks that cannot be named are skipped and counted: unknown parent, partial block,
media, layers with another window. A block is reported once. TensorRT-LLM's event buffer drops the oldest events when
it is full, which leaves a gap in the event ids; then all reported blocks are cleared. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.core.hashing import check_block_size, local_hashes, sequence_hashes
from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier
from kvolt.engines.kv_formats.trtllm_seeds import EngineHash, SequenceSeeds

_TIERS = {0: Tier.DEVICE, 1: Tier.HOST}
"""Tier of each cache level."""
MAX_NAMES = 1 << 19

# Events as written by TensorRT-LLM's KVCacheEventSerializer: dictionaries with an id and a window. Unused fields are
# ignored.


class UniqueToken(msgspec.Struct, frozen=True):
    token_id: int | str
    """A string for media."""
    token_extra_id: int = 0


class StoredBlock(msgspec.Struct, frozen=True):
    block_hash: EngineHash
    tokens: tuple[UniqueToken, ...]
    cache_level: int = 0
    mm_keys: tuple[Any, ...] = ()


class StoredData(msgspec.Struct, frozen=True, tag_field="type", tag="stored"):
    """Consecutive blocks of one sequence."""

    blocks: tuple[StoredBlock, ...]
    parent_hash: EngineHash | None = None


class RemovedData(msgspec.Struct, frozen=True, tag_field="type", tag="removed"):
    block_hashes: tuple[EngineHash, ...]


class CreatedData(msgspec.Struct, frozen=True, tag_field="type", tag="created"):
    """Creation of the pools; the first event."""


class Diff(msgspec.Struct, frozen=True):
    new_value: int


class UpdatedData(msgspec.Struct, frozen=True, tag_field="type", tag="updated"):
    block_hash: EngineHash
    cache_level: Diff | None = None


class TrtllmKvEvent(msgspec.Struct, frozen=True):
    event_id: int
    data: StoredData | RemovedData | CreatedData | UpdatedData
    window_size: int | None = None
    """Attention window of the layers that these blocks belong to."""


@dataclass(slots=True)
class _Name:
    """Name of one block. Its children use the same seed."""

    sequence: SequenceHash
    parent: SequenceHash | None
    seed: int
    tier: Tier


class _Unnamed(Exception):
    """A block that cannot be named; the reason is its first argument."""


class TrtllmTranslator:
    """See the module. Events must be translated in order."""

    def __init__(self, block_size: int, seeds: SequenceSeeds, max_names: int = MAX_NAMES) -> None:
        self._block_size = check_block_size(block_size)
        self._seeds = seeds
        self._max_names = max_names
        self._names: dict[EngineHash, _Name] = {}
        """Oldest first."""
        self._reported: set[SequenceHash] = set()
        self._window: int | None = None
        """The widest attention window, whose layers need the whole prefix or most of it."""
        self._next_id: int | None = None
        self.num_lost = 0
        """Events that the engine dropped before they were fetched."""
        self.skipped: Counter[str] = Counter()
        """Number of skipped blocks or events by reason."""

    def translate(self, raw_event: Any) -> list[KvChange]:
        try:
            event = msgspec.convert(raw_event, TrtllmKvEvent)
        except msgspec.ValidationError:  # of an unknown type or form
            return self._skip("unreadable")
        changes = self._check_gap(event.event_id)
        if isinstance(event.data, CreatedData):
            return changes + self._translate_created(event.window_size)
        if self._window is None:
            self._window = event.window_size
        if event.window_size != self._window:
            return changes + self._skip("window")
        match event.data:
            case StoredData():
                return changes + self._translate_stored(event.data)
            case RemovedData():
                return changes + self._remove(event.data.block_hashes)
            case UpdatedData():
                return changes + self._translate_updated(event.data)
        return changes

    def drop_seeds(self, seeds: Collection[int]) -> list[KvChange]:
        """Remove the blocks of an unloaded adapter: TensorRT-LLM may keep them, but no request finds them."""
        self._seeds.drop_seeds(seeds)
        return self._remove(tuple(block for block, name in self._names.items() if name.seed in seeds))

    def _check_gap(self, event_id: int) -> list[KvChange]:
        due, self._next_id = self._next_id, event_id + 1
        if due is None or event_id == due:
            return []
        self.num_lost += max(event_id - due, 0)
        return self._clear()

    def _clear(self) -> list[KvChange]:
        if not self._names:
            return []
        self._names.clear()
        self._reported.clear()
        return [Cleared()]

    def _translate_created(self, window: int | None) -> list[KvChange]:
        if window is None or (self._window is not None and window <= self._window):
            return []
        self._window = window
        return self._clear()

    # --- stored

    def _translate_stored(self, data: StoredData) -> list[KvChange]:
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
            if known is not None:  # reported before
                self._append_run(changes, run, parent)
                parent = above = known
                continue
            try:
                name = self._name(block, above)
            except _Unnamed as reason:
                self._skip(str(reason))
                self._skip("below", len(data.blocks) - number - 1)
                break
            if run and name.tier is not run[-1].tier:
                self._append_run(changes, run, parent)
                parent = above
            self._names[block.block_hash] = name
            self._reported.add(name.sequence)
            run.append(name)
            above = name
        self._append_run(changes, run, parent)
        return changes + self._evict_oldest()

    def _append_run(self, changes: list[KvChange], run: list[_Name], parent: _Name | None) -> None:
        if run:
            above = parent.sequence if parent is not None else None
            changes.append(Stored.from_hashes([each.sequence for each in run], above, tier=run[0].tier))
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
                raise _Unnamed("seed")
            local = local_hashes(tokens, self._block_size, seed)
        except InvalidRequest:
            raise _Unnamed("tokens") from None
        parent = above.sequence if above is not None else None
        sequence = sequence_hashes(local, parent)[0]
        if sequence in self._reported:  # two blocks with one name: one of them is misidentified
            raise _Unnamed("twice")
        return _Name(sequence, parent, seed, tier)

    def _evict_oldest(self) -> list[KvChange]:
        """Drop the oldest names over the limit and report the blocks as removed, because their removal could
        not be translated later."""
        changes: list[KvChange] = []
        while len(self._names) > self._max_names:
            self.skipped["no_room"] += 1
            changes += self._remove((next(iter(self._names)),))
        return changes

    # --- removed, moved

    def _remove(self, blocks: tuple[EngineHash, ...]) -> list[KvChange]:
        removed: dict[Tier, list[SequenceHash]] = {}
        for block in blocks:
            name = self._names.pop(block, None)
            if name is None:
                self._skip("unknown_block")
                continue
            self._reported.discard(name.sequence)
            removed.setdefault(name.tier, []).append(name.sequence)
        return [Removed.from_hashes(hashes, tier) for tier, hashes in removed.items()]

    def _translate_updated(self, data: UpdatedData) -> list[KvChange]:
        """Move a block to another tier."""
        name = self._names.get(data.block_hash)
        if name is None or data.cache_level is None:
            return []
        tier = _TIERS.get(data.cache_level.new_value)
        if tier is None or (name.parent is not None and name.parent not in self._reported):
            return self._remove((data.block_hash,))
        if tier is name.tier:
            return []
        old, name.tier = name.tier, tier
        return [
            Stored.from_hashes([name.sequence], name.parent, tier=tier),
            Removed.from_hashes([name.sequence], old),
        ]

    # ---

    def _skip(self, reason: str, number: int = 1) -> list[KvChange]:
        if number:
            self.skipped[reason] += number
        return []
