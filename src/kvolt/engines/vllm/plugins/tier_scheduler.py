"""Scheduler half of the tier connector: decides which blocks are onboarded and which are offloaded.

Tracks the blocks in the workers' tiers from their updates; a block is usable once every worker has its piece. The view
may lag: loading a block that was removed fails, and vLLM computes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from typing import Any, cast

import msgspec

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Tier
from kvolt.core.load import StepStats
from kvolt.engines.vllm.plugins.tier_events import TierEvents
from kvolt.engines.vllm.plugins.tier_messages import (
    BlockMove,
    TierCommands,
    TierUpdate,
    hash_of,
    key_of,
)
from kvolt.engines.vllm.plugins.tier_names import BlockDescription, packed_tokens
from kvolt.engines.vllm.plugins.tier_onboard_policy import TierOnboardPolicy
from kvolt.engines.vllm.plugins.tier_stats import TierCounters, TierPayload, TiersPayload
from kvolt.kv.tiers.metrics import HitWindow

_TIERS = (Tier.HOST, Tier.DISK)
_MAX_TIMED = 64
"""Steps whose times are awaited; some are never reported."""

ExtraKeys = Callable[[Any, int, int], Any]
"""Extra keys of vLLM's block hash, for a request's tokens from start to end."""


@dataclass(slots=True)
class _Tracked:
    """State of one request."""

    request: Any
    keys: list[BlockKey] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed_blocks: int = 0
    """Leading blocks in vLLM's own cache, as of its last query."""
    is_loading: bool = False
    """Blocks are being loaded; vLLM keeps them allocated until then, even if the request ends."""
    loaded_after: int | None = None
    """Number of preemptions when blocks were last loaded."""
    num_offloaded: int = 0
    """Leading blocks that are in a tier or being offloaded."""
    onboard_decision: tuple[int, int, int] | None = None
    """Last decision: blocks in vLLM, blocks in tiers, blocks to load. Cached, since vLLM queries repeatedly."""
    loads: list[Tier] = field(default_factory=list)
    """Source tiers of the blocks loaded last."""
    num_before: int = 0
    """Blocks in vLLM when those were loaded."""
    is_counted: bool = False


class TierScheduler:
    """See the module."""

    def __init__(
        self,
        block_size: int,
        num_workers: int,
        identity: bytes,
        policy: TierOnboardPolicy,
        events: TierEvents | None = None,
        extra_keys: ExtraKeys = lambda request, start, end: None,
    ) -> None:
        """`events`: publishes KV events of the tiers; None without KV events."""
        self._block_size = block_size
        self._num_workers = num_workers
        self._identity = identity
        self._policy = policy
        self._events = events
        self._extra_keys = extra_keys
        self._copies: Counter[tuple[Tier, SequenceHash]] = Counter()
        self.num_blocks_by_tier: Counter[Tier] = Counter()
        """Usable blocks per tier."""
        self._requests: dict[str, _Tracked] = {}
        self._commands = TierCommands()
        self._storing: set[str] = set()
        """Requests with offloads in progress."""
        self._numbers = count()
        self._timed: dict[int, StepStats] = {}
        self.counters: dict[Tier, TierCounters] = {}
        self.hits = HitWindow()
        self.num_onboarded = 0

    def stats(self) -> dict[str, Any]:
        """Statistics for `VllmTierMetrics`; empty until the workers have reported."""
        if not self.counters:
            return {}
        tiers = {
            tier: TierPayload(
                **msgspec.structs.asdict(counters),
                num_blocks=self.num_blocks_by_tier[tier],
                num_hits=self.hits.num_hits(tier),
            )
            for tier, counters in self.counters.items()
        }
        payload = TiersPayload(tiers, self.hits.num_requested, self.num_onboarded, self._policy.num_declined)
        return cast("dict[str, Any]", msgspec.to_builtins(payload))

    def tier_of(self, key: BlockKey) -> Tier | None:
        """Nearest tier with the block."""
        name = hash_of(key)
        return next((tier for tier in _TIERS if self._is_stored((tier, name))), None)

    def _is_stored(self, copy: tuple[Tier, SequenceHash]) -> bool:
        return self._copies[copy] >= self._num_workers

    def _keys(self, tracked: _Tracked, end: int) -> list[BlockKey]:
        """Keys of a request's blocks before `end`, as far as vLLM has hashed them."""
        names, keys = tracked.request.block_hashes, tracked.keys
        for name in names[len(keys) : end]:
            keys.append(key_of(bytes(name), self._identity))
        return keys

    def _describe(self, tracked: _Tracked, index: int) -> None:
        """Describe a block by its tokens, for its KV event."""
        if self._events is None or self._events.is_described(number := hash_of(tracked.keys[index])):
            return
        request, names = tracked.request, tracked.request.block_hashes
        start, end = index * self._block_size, (index + 1) * self._block_size
        self._events.describe(
            BlockDescription(
                number=number,
                name=bytes(names[index]),
                parent=bytes(names[index - 1]) if index else None,
                tokens=packed_tokens(request.all_token_ids[start:end]),
                extra_keys=self._extra_keys(request, start, end),
            )
        )

    # --- requests

    def find_offloaded(self, request: Any, num_computed_tokens: int) -> int:
        """Number of tokens to load after the computed ones. The last token of a prompt is always computed."""
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        tracked.request, tracked.num_computed_blocks = request, num_computed_tokens // self._block_size
        if num_computed_tokens % self._block_size or request.lora_request is not None:
            return 0  # block hashes do not include the weights of an adapter, which may change
        if tracked.loaded_after == request.num_preemptions:
            return 0  # the last load failed: compute
        end = (request.num_tokens - 1) // self._block_size
        first = tracked.num_computed_blocks
        tracked.loads = []
        for index, key in enumerate(self._keys(tracked, end)[first:end], first):
            tier = self.tier_of(key)
            if tier is None:
                break
            self._describe(tracked, index)
            tracked.loads.append(tier)
        del tracked.loads[self._num_to_onboard(tracked) :]
        return len(tracked.loads) * self._block_size

    def _num_to_onboard(self, tracked: _Tracked) -> int:
        num_computed_blocks, num_in_tiers = tracked.num_computed_blocks, len(tracked.loads)
        if tracked.onboard_decision is None or tracked.onboard_decision[:2] != (
            num_computed_blocks,
            num_in_tiers,
        ):
            num_to_load = self._policy.num_to_onboard(
                tracked.request.num_tokens, num_computed_blocks, tracked.loads
            )
            tracked.onboard_decision = (num_computed_blocks, num_in_tiers, num_to_load)
        return tracked.onboard_decision[2]

    def on_allocated(self, request: Any, blocks: list[int], num_tokens: int) -> None:
        """vLLM has allocated blocks for a request; `num_tokens` of them are to be loaded."""
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        tracked.blocks = list(blocks)
        if not num_tokens:
            return
        first = tracked.num_computed_blocks
        end = first + num_tokens // self._block_size
        keys = self._keys(tracked, end)
        self._commands.loads[request.request_id] = [
            self._move(keys, index, tracked.blocks) for index in range(first, end)
        ]
        tracked.num_offloaded, tracked.num_before = end, first
        tracked.is_loading, tracked.loaded_after = True, request.num_preemptions
        self.num_onboarded += end - first

    def tiers_of_load(self, request_id: str) -> Counter[Tier]:
        """Source tiers of the blocks loaded last."""
        tracked = self._requests.get(request_id)
        return Counter(tracked.loads) if tracked is not None else Counter()

    @staticmethod
    def _move(keys: list[BlockKey], index: int, blocks: list[int]) -> BlockMove:
        return BlockMove(keys[index], keys[index - 1] if index else None, index, blocks[index])

    # --- steps

    def build_commands(self, output: Any) -> TierCommands:
        """Commands for the step that vLLM has planned."""
        self._commands.preempted |= output.preempted_req_ids or set()
        step = StepStats()
        for each in output.scheduled_new_reqs:
            tracked = self._requests.get(each.req_id)
            if tracked is not None:
                tracked.blocks = list(each.block_ids[0])
                # Blocks that failed to load are computed and offloaded again.
                tracked.num_offloaded = min(
                    tracked.num_offloaded, each.num_computed_tokens // self._block_size
                )
                self._count(tracked, each.num_computed_tokens // self._block_size)
                step = self._store(each.req_id, tracked, each.num_computed_tokens, output, step)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            new = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                tracked.blocks, tracked.num_offloaded = list(new[0]) if new else [], 0
                self._storing.discard(request_id)  # earlier copies have been waited for
            elif new:
                tracked.blocks += new[0]
            step = self._store(request_id, tracked, cached.num_computed_tokens[index], output, step)
        commands, self._commands = self._commands, TierCommands()
        if step.prefill_tokens:
            commands.timed = next(self._numbers)
            self._timed[commands.timed] = step
            while len(self._timed) > _MAX_TIMED:
                del self._timed[next(iter(self._timed))]
        return commands

    def _count(self, tracked: _Tracked, num_computed_blocks: int) -> None:
        """Count a started request's hits per tier."""
        if not tracked.is_counted:
            tracked.is_counted = True
            num_loaded = (
                max(num_computed_blocks - tracked.num_before, 0) if tracked.loaded_after is not None else 0
            )
            by_tier = Counter(tracked.loads[:num_loaded])
            num_prompt_blocks = tracked.request.num_prompt_tokens // self._block_size
            self.hits.add(num_prompt_blocks, tuple(by_tier.items()))

    def _store(
        self, request_id: str, tracked: _Tracked, num_computed: int, output: Any, step: StepStats
    ) -> StepStats:
        """Offload the blocks that the step completes for a request; returns the step stats including the request."""
        tracked.is_loading = False
        num_tokens = output.num_scheduled_tokens.get(request_id, 0)
        num_done = num_computed + num_tokens
        if tracked.request.lora_request is None:
            self._offload(request_id, tracked, num_done)
        if num_computed + 1 < tracked.request.num_tokens:
            return msgspec.structs.replace(
                step,
                prefill_tokens=step.prefill_tokens + num_tokens,
                prefill_context=step.prefill_context + num_tokens * num_done,
            )
        return msgspec.structs.replace(
            step, batch=step.batch + 1, context_tokens=step.context_tokens + num_done
        )

    def _offload(self, request_id: str, tracked: _Tracked, num_done: int) -> None:
        end = min(num_done // self._block_size, len(tracked.blocks))
        keys = self._keys(tracked, end)
        end = min(end, len(keys))
        moves: list[BlockMove] = []
        for index in range(tracked.num_offloaded, end):
            if self.tier_of(keys[index]) is None:
                self._describe(tracked, index)
                moves.append(self._move(keys, index, tracked.blocks))
        tracked.num_offloaded = max(end, tracked.num_offloaded)
        if moves:
            self._commands.stores[request_id] = moves
            self._storing.add(request_id)

    def clear(self) -> None:
        """Clear the workers' tiers; this side follows their updates."""
        self._commands.clear = True

    def apply_initial(self, by_worker: Iterable[TierUpdate]) -> None:
        """Apply the initial content of all workers' tiers as one update."""
        self.apply_update(reduce(TierUpdate.aggregate, by_worker, TierUpdate()))

    def apply_update(self, update: TierUpdate) -> None:
        copies = list(dict.fromkeys([*update.stored, *update.removed]))
        were_stored = [self._is_stored(copy) for copy in copies]
        self._copies.update(update.stored)
        self._copies.subtract(update.removed)
        for copy, was_stored in zip(copies, were_stored, strict=True):
            is_stored = self._is_stored(copy)
            if self._copies[copy] <= 0:
                del self._copies[copy]
            if is_stored != was_stored:
                tier, number = copy
                self.num_blocks_by_tier[tier] += 1 if is_stored else -1
                if self._events is not None:
                    self._events.on_moved(tier, number, is_stored=is_stored)
        if copies and self._events is not None:
            self._events.flush()
        for tier, counters in update.counters.items():
            before = self.counters.get(tier, counters)  # counts never shrink, speeds are recent
            self.counters[tier] = msgspec.structs.replace(counters.combine(before), block_s=counters.block_s)
        self._policy.block_s = {tier: each.block_s for tier, each in self.counters.items()}
        for timed, took_s in update.step_s.items():
            if (step := self._timed.pop(timed, None)) is not None:
                self._policy.times.add(msgspec.structs.replace(step, time_s=took_s))

    def on_finished(self, request_id: str) -> bool:
        """Whether vLLM must keep the request's blocks until offloads are done."""
        tracked = self._requests.pop(request_id, None)
        is_storing = request_id in self._storing
        self._storing.discard(request_id)
        if not is_storing or (tracked is not None and tracked.is_loading):
            return False
        self._commands.awaited.add(request_id)
        return True
