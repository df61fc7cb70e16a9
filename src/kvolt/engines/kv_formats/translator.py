"""Translator: converts an engine's KV events to kvolt's, whose SequenceHashes are computed from the tokens.

An engine names a block by its own hash, which cannot be computed elsewhere. Its events have the tokens and the hash of
the parent block, so a map from engine hashes to SequenceHashes is kept for the blocks in the engine's cache. Blocks
that cannot be named (unknown parent, unknown extra keys, layers that do not keep whole prefixes) are skipped and
counted: a missing block costs a router a cache hit, a wrong one a wrong decision.

An engine reports a block once per copy; kvolt's events report it with the first copy and remove it with the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvolt.core.errors import InvalidRequest
from kvolt.core.hashing import check_block_size, local_hashes, request_seed, sequence_hashes
from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier
from kvolt.engines.kv_formats.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineHash,
    SourceEngine,
    decode_batch,
)

SALT_TAG = "kvolt-salt:"
"""Prefix of salts in requests to vLLM, which distinguishes a salt from its other extra keys."""

MAX_BYTES = 256 * 1024 * 1024
NAME_BYTES = 512
"""Memory per block name, rounded up; a test compares it with tracemalloc."""

_TIERS = {
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.OBJECT,
}
_WHOLE_PREFIX = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of layers that need the whole prefix. Others keep a window or a state."""
_MEDIA_ID = re.compile(r"[0-9a-f]{64}")


class Translated(NamedTuple):
    changes: tuple[KvChange, ...]
    dp_rank: int | None


@dataclass(slots=True)
class _Name:
    """Name of one block. Its children use the same seed, because engines report a salt only with the first block."""

    sequence: SequenceHash
    seed: int


@dataclass(slots=True)
class _Blocks:
    """The blocks of a BlockStored event that can be named, and their parent."""

    names: list[_Name] = field(default_factory=list)
    parent: SequenceHash | None = None


class Translator:
    """For one rank of one engine. Batches must be translated in order."""

    def __init__(
        self,
        engine: SourceEngine,
        block_size: int,
        lora_name: Callable[[int | str], str | None] = lambda lora_id: None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`lora_name` maps an adapter id to its name, for events without names."""
        self._engine = engine
        self._block_size = check_block_size(block_size)
        self._lora_name = lora_name
        self._max_names = max(max_bytes // NAME_BYTES, 1)
        self._names: dict[EngineHash, _Name] = {}
        """Least recently used first."""
        self._copies: dict[Tier, dict[EngineHash, int]] = {}
        self._group: int | None = None
        """The KV cache group whose blocks are reported, if the engine has several."""
        self._is_group_known = False
        self.skipped: Counter[str] = Counter()
        """Number of skipped blocks or events by reason."""

    @property
    def num_bytes(self) -> int:
        return len(self._names) * NAME_BYTES

    def translate(self, payload: bytes) -> Translated:
        """Translate a batch. MsgspecError if it is not a batch of this engine."""
        batch = decode_batch(payload, self._engine)
        if batch.num_unreadable:
            self.skipped["unreadable"] += batch.num_unreadable
        changes: list[KvChange] = []
        for event in batch.events:
            match event:
                case BlockStored():
                    changes += self._translate_stored(event)
                case BlockRemoved():
                    changes += self._translate_removed(event)
                case AllBlocksCleared():
                    self._names.clear()
                    self._copies.clear()
                    changes.append(Cleared())
        return Translated(tuple(changes), batch.dp_rank)

    # --- stored

    def _translate_stored(self, event: BlockStored) -> list[KvChange]:
        tier = self._tier_of(event.medium)
        num_blocks = len(event.block_hashes)
        if tier is None:
            return self._skip("medium", num_blocks)
        if not self._is_followed(event.group_idx, event.kv_cache_spec_kind):
            return self._skip("group", num_blocks)
        if event.block_size not in (0, self._block_size):
            return self._skip("block_size", num_blocks)
        blocks = self._name_blocks(event) if event.token_ids else self._find_blocks(event)
        copies = self._copies.setdefault(tier, {})
        are_new: list[bool] = []
        for engine_hash, name in zip(event.block_hashes, blocks.names, strict=False):
            # Reinserted, so that the dict is in order of use.
            self._names[engine_hash] = self._names.pop(engine_hash, name)
            copies[engine_hash] = copies.get(engine_hash, 0) + 1
            are_new.append(copies[engine_hash] == 1)
        return [*_stored_runs(blocks, are_new, tier), *self._evict_oldest()]

    def _name_blocks(self, event: BlockStored) -> _Blocks:
        """Name blocks by their tokens, up to the first block with unknown keys."""
        num_blocks = len(event.block_hashes)
        if len(event.token_ids) != num_blocks * self._block_size:
            self._skip("tokens", num_blocks)
            return _Blocks()
        parent = None
        if event.parent_block_hash is not None:
            parent = self._names.get(event.parent_block_hash)
            if parent is None:
                self._skip("unknown_parent", num_blocks)
                return _Blocks()
        keys = [self._read_keys(event, index) for index in range(num_blocks)]
        num_known = next((index for index, each in enumerate(keys) if each is None), num_blocks)
        salt = event.cache_salt or next((each.salt for each in keys[:num_known] if each and each.salt), None)
        try:
            seed = parent.seed if parent is not None else self._root_seed(event, salt)
            media = [each.media for each in keys[:num_known] if each is not None]
            tokens = event.token_ids[: num_known * self._block_size]
            local = local_hashes(tokens, self._block_size, seed, media if any(media) else None)
        except InvalidRequest:
            self._skip("tokens", num_blocks)
            return _Blocks()
        except LookupError:
            self._skip("unknown_lora", num_blocks)
            return _Blocks()
        if num_known < num_blocks:
            self._skip("unknown_keys", num_blocks - num_known)
        above = parent.sequence if parent is not None else None
        sequence = sequence_hashes(local, above)
        return _Blocks([_Name(each, seed) for each in sequence], above)

    def _find_blocks(self, event: BlockStored) -> _Blocks:
        """Names of blocks without tokens, which are copies of known blocks, up to the first unknown one."""
        names: list[_Name] = []
        for engine_hash in event.block_hashes:
            name = self._names.get(engine_hash)
            if name is None:
                break
            names.append(name)
        if len(names) < len(event.block_hashes):
            self._skip("unknown_block", len(event.block_hashes) - len(names))
        parent = self._names.get(event.parent_block_hash) if event.parent_block_hash is not None else None
        return _Blocks(names, parent.sequence if parent is not None else None)

    def _root_seed(self, event: BlockStored, salt: str | None) -> int:
        """The seed of a sequence's first block. LookupError if the adapter has no name."""
        lora = event.lora_name
        if not lora and event.lora_id is not None:
            lora = self._lora_name(event.lora_id)
            if lora is None:
                raise LookupError(event.lora_id)
        return request_seed(lora, salt.removeprefix(SALT_TAG) if salt else None)

    def _read_keys(self, event: BlockStored, index: int) -> _Keys | None:
        """The extra keys of a block; None if one of them is unknown."""
        all_keys = event.extra_keys or ()
        block_keys = all_keys[index] if index < len(all_keys) else None
        media: list[int] = []
        salt: str | None = None
        for key in block_keys or ():
            text = _text_of(key)
            if text is None:
                return None
            if text.startswith(SALT_TAG):
                salt = text
            elif _MEDIA_ID.fullmatch(text):
                media.append(int(text[:16], 16))
            elif text != event.lora_name:
                return None
        return _Keys(media, salt)

    # --- removed

    def _translate_removed(self, event: BlockRemoved) -> list[KvChange]:
        tier = self._tier_of(event.medium)
        num_blocks = len(event.block_hashes)
        if tier is None:
            return self._skip("medium", num_blocks)
        if self._is_group_known and event.group_idx not in (None, self._group):
            return self._skip("group", num_blocks)
        copies = self._copies.get(tier, {})
        removed: list[SequenceHash] = []
        for engine_hash in event.block_hashes:
            num_copies = copies.get(engine_hash, 0)
            if num_copies == 0:
                self._skip("unknown_block", 1)
            elif num_copies > 1:
                copies[engine_hash] = num_copies - 1
            else:
                del copies[engine_hash]
                removed.append(self._names[engine_hash].sequence)
                self._drop_if_unheld(engine_hash)
        return [Removed.from_hashes(removed, tier)] if removed else []

    def _drop_if_unheld(self, engine_hash: EngineHash) -> None:
        if not any(engine_hash in copies for copies in self._copies.values()):
            del self._names[engine_hash]

    def _evict_oldest(self) -> list[KvChange]:
        """Drop the oldest names over the limit and report the blocks as removed, because their removal could
        not be translated later."""
        changes: list[KvChange] = []
        while len(self._names) > self._max_names:
            engine_hash, name = next(iter(self._names.items()))
            del self._names[engine_hash]
            self.skipped["no_room"] += 1
            for tier, copies in self._copies.items():
                if copies.pop(engine_hash, None) is not None:
                    changes.append(Removed.from_hashes([name.sequence], tier))
        return changes

    # ---

    def _tier_of(self, medium: str | None) -> Tier | None:
        return Tier.DEVICE if medium is None else _TIERS.get(medium)

    def _is_followed(self, group: int | None, kind: str | None) -> bool:
        """Whether events of this group are used: those of the first group that needs whole prefixes."""
        if kind is not None and kind not in _WHOLE_PREFIX:
            return False
        if not self._is_group_known:
            self._group, self._is_group_known = group, True
        return group == self._group

    def _skip(self, reason: str, number: int) -> list[KvChange]:
        self.skipped[reason] += number
        return []


class _Keys(NamedTuple):
    media: list[int]
    salt: str | None


def _text_of(key: Any) -> str | None:
    """A key as text. Media keys are pairs with an offset, which is ignored."""
    if isinstance(key, list | tuple) and key:
        key = key[0]
    return key if isinstance(key, str) else None


def _stored_runs(blocks: _Blocks, are_new: Sequence[bool], tier: Tier) -> list[KvChange]:
    """Stored events for the runs of new blocks, each with its parent."""
    changes: list[KvChange] = []
    run: list[_Name] = []
    parent = above = blocks.parent
    for name, is_new in zip(blocks.names, are_new, strict=True):
        if is_new:
            if not run:
                parent = above
            run.append(name)
        elif run:
            changes.append(_stored_run(run, parent, tier))
            run = []
        above = name.sequence
    if run:
        changes.append(_stored_run(run, parent, tier))
    return changes


def _stored_run(run: Sequence[_Name], parent: SequenceHash | None, tier: Tier) -> Stored:
    return Stored.from_hashes([name.sequence for name in run], parent, tier=tier)
