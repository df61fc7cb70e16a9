"""The half of the tier connector that runs beside vLLM's scheduler: which blocks are brought, which are copied down.

Knows what the workers' tiers have by what they tell. A block counts once every worker has its piece. What it believes
may be a moment old: a block that has gone meanwhile is a load that fails, and vLLM computes it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Tier
from kvolt.engines.vllm.tier_messages import Move, Orders, Told, hash_of, key_of

_TIERS = (Tier.HOST, Tier.DISK)


@dataclass(slots=True)
class _Tracked:
    """A request that vLLM has."""

    request: Any
    keys: list[BlockKey] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_here: int = 0
    """Blocks from the first on that vLLM had itself when it last looked."""
    is_loading: bool = False
    """Blocks are on their way to it: vLLM itself keeps them until they have come, however it ends."""
    loaded_after: int | None = None
    """How often it had been preempted when blocks were last brought for it."""
    num_seen: int = 0
    """Of its blocks, from the first on, those that are copied, or were there."""


class TierScheduler:
    """See the module."""

    def __init__(self, block_size: int, num_workers: int, identity: bytes) -> None:
        self._block_size = block_size
        self._num_workers = num_workers
        self._identity = identity
        self._copies: Counter[tuple[Tier, SequenceHash]] = Counter()
        self._requests: dict[str, _Tracked] = {}
        self._orders = Orders()
        self._storing: set[str] = set()
        """Requests of which blocks were ordered down."""

    def has(self, key: BlockKey) -> bool:
        name = hash_of(key)
        return any(self._copies[tier, name] >= self._num_workers for tier in _TIERS)

    def _keys(self, tracked: _Tracked, end: int) -> list[BlockKey]:
        """Of a request's blocks up to there, as far as vLLM has named them."""
        names, keys = tracked.request.block_hashes, tracked.keys
        for name in names[len(keys) : end]:
            keys.append(key_of(bytes(name), self._identity))
        return keys

    def find(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens that can be brought beyond those that are there. The last one of a prompt is always computed."""
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        tracked.request, tracked.num_here = request, num_computed_tokens // self._block_size
        if num_computed_tokens % self._block_size or request.lora_request is not None:
            return 0  # what an adapter is made of is not in the names: it may have been trained since
        if tracked.loaded_after == request.num_preemptions:
            return 0  # they did not come: it is computed
        most = (request.num_tokens - 1) // self._block_size
        keys = self._keys(tracked, most)[tracked.num_here : most]
        num_found = next((index for index, key in enumerate(keys) if not self.has(key)), len(keys))
        return num_found * self._block_size

    def allocated(self, request: Any, blocks: list[int], num_tokens: int) -> None:
        """vLLM has room for a request, and so many of its tokens are to be brought."""
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        tracked.blocks = list(blocks)
        if not num_tokens:
            return
        first = tracked.num_here
        end = first + num_tokens // self._block_size
        keys = self._keys(tracked, end)
        self._orders.loads[request.request_id] = [
            self._move(keys, index, tracked.blocks) for index in range(first, end)
        ]
        tracked.num_seen = end
        tracked.is_loading, tracked.loaded_after = True, request.num_preemptions

    @staticmethod
    def _move(keys: list[BlockKey], index: int, blocks: list[int]) -> Move:
        return Move(keys[index], keys[index - 1] if index else None, index, blocks[index])

    def orders(self, output: Any) -> Orders:
        """For the step that vLLM has planned."""
        for each in output.scheduled_new_reqs:
            tracked = self._requests.get(each.req_id)
            if tracked is not None:
                tracked.blocks = list(each.block_ids[0])
                # Of what was to be brought some may not have come: those are computed, and kept again.
                tracked.num_seen = min(tracked.num_seen, each.num_computed_tokens // self._block_size)
                self._store(each.req_id, tracked, each.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for place, request_id in enumerate(cached.req_ids):
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            new = cached.new_block_ids[place]
            if request_id in cached.resumed_req_ids:
                tracked.blocks, tracked.num_seen = list(new[0]) if new else [], 0
                self._storing.discard(request_id)  # what was copied of it before has been waited for
            elif new:
                tracked.blocks += new[0]
            self._store(request_id, tracked, cached.num_computed_tokens[place], output)
        orders, self._orders = self._orders, Orders()
        return orders

    def _store(self, request_id: str, tracked: _Tracked, num_computed: int, output: Any) -> None:
        tracked.is_loading = False
        if tracked.request.lora_request is not None:
            return
        num_done = num_computed + output.num_scheduled_tokens.get(request_id, 0)
        end = min(num_done // self._block_size, len(tracked.blocks))
        keys = self._keys(tracked, end)
        end = min(end, len(keys))
        moves = [
            self._move(keys, index, tracked.blocks)
            for index in range(tracked.num_seen, end)
            if not self.has(keys[index])
        ]
        tracked.num_seen = max(end, tracked.num_seen)
        if moves:
            self._orders.stores[request_id] = moves
            self._storing.add(request_id)

    def clear(self) -> None:
        """The workers forget all; what is believed here goes with what they tell."""
        self._orders.clear = True

    def told(self, told: Told) -> None:
        self._copies.update(told.stored)
        self._copies.subtract(told.removed)
        for name in told.removed:
            if self._copies[name] <= 0:
                del self._copies[name]

    def finished(self, request_id: str) -> bool:
        """Whether its blocks must stay for a while."""
        tracked = self._requests.pop(request_id, None)
        is_storing = request_id in self._storing
        self._storing.discard(request_id)
        if not is_storing or (tracked is not None and tracked.is_loading):
            return False
        self._orders.awaited.add(request_id)
        return True
