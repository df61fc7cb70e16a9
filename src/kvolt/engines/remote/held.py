"""HeldBlocks: the blocks that a server holds on its device by what it has told. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier
from kvolt.core.request import Request


class HeldBlocks:
    """As many entries as the server has blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: set[SequenceHash] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, changes: Sequence[KvChange]) -> None:
        for change in changes:
            if isinstance(change, Cleared):
                if change.tier in (None, Tier.DEVICE):
                    self._hashes.clear()
            elif change.tier is Tier.DEVICE and isinstance(change, Stored):
                self._hashes.update(change.sequence_hashes)
            elif change.tier is Tier.DEVICE and isinstance(change, Removed):
                self._hashes.difference_update(change.sequence_hashes)

    def cached_tokens(self, request: Request) -> int:
        """Of the prompt, those in blocks that are held, from its start."""
        if not self._hashes:
            return 0
        names: Sequence[SequenceHash] = request.sequence_hashes
        if request.block_size != self._block_size or not names:
            hasher = SequenceHasher(self._block_size, request_seed(request.lora, request.salt))
            names = hasher.extend(request.token_ids)
        num_held = next((at for at, name in enumerate(names) if name not in self._hashes), len(names))
        return num_held * self._block_size
