"""The half of the tier connector that runs beside vLLM's scheduler: which blocks are brought, which are copied down.

Knows what the workers' tiers have by what they tell. A block counts once every worker has its piece. What it believes
may be a moment old: a block that has gone meanwhile is a load that fails, and vLLM computes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count
from typing import Any

import msgspec

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Tier
from kvolt.core.load import StepStats
from kvolt.engines.vllm.plugins.tier_events import TierEvents
from kvolt.engines.vllm.plugins.tier_messages import Move, Orders, TierFigures, Told, hash_of, key_of
from kvolt.engines.vllm.plugins.tier_names import Described, packed_tokens
from kvolt.engines.vllm.plugins.tier_worth import TierWorth
from kvolt.kv.tiers.hit_window import HitWindow

_TIERS = (Tier.HOST, Tier.DISK)
_MOST_TIMED = 64
"""Steps that may be under way, of which some are never heard of."""

ExtraKeys = Callable[[Any, int, int], Any]
"""Of a request's tokens from there to there, what else their block's name is made of."""


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
    weighed: tuple[int, int, int] | None = None
    """Blocks that were here, that lay in tiers, and of those the ones to bring: vLLM asks again and again."""
    loads: list[Tier] = field(default_factory=list)
    """Where the blocks lay that were brought for it last."""
    num_before: int = 0
    """Blocks that were here when those were brought."""
    is_counted: bool = False


class TierScheduler:
    """See the module."""

    def __init__(
        self,
        block_size: int,
        num_workers: int,
        identity: bytes,
        worth: TierWorth,
        events: TierEvents | None = None,
        extra_keys: ExtraKeys = lambda request, start, end: None,
    ) -> None:
        """`events`: what routers are told; None where nobody is."""
        self._block_size = block_size
        self._num_workers = num_workers
        self._identity = identity
        self._worth = worth
        self._events = events
        self._extra_keys = extra_keys
        self._copies: Counter[tuple[Tier, SequenceHash]] = Counter()
        self.num_there: Counter[Tier] = Counter()
        """Blocks that can be brought from there."""
        self._requests: dict[str, _Tracked] = {}
        self._orders = Orders()
        self._storing: set[str] = set()
        """Requests of which blocks were ordered down."""
        self._numbers = count()
        self._timed: dict[int, StepStats] = {}
        self.figures: dict[Tier, TierFigures] = {}
        self.hits = HitWindow()
        self.num_brought = 0

    @property
    def num_declined(self) -> int:
        return self._worth.num_declined

    def tier_of(self, key: BlockKey) -> Tier | None:
        """The nearest that has it."""
        name = hash_of(key)
        return next((tier for tier in _TIERS if self._is_there((tier, name))), None)

    def _is_there(self, copy: tuple[Tier, SequenceHash]) -> bool:
        return self._copies[copy] >= self._num_workers

    def _keys(self, tracked: _Tracked, end: int) -> list[BlockKey]:
        """Of a request's blocks up to there, as far as vLLM has named them."""
        names, keys = tracked.request.block_hashes, tracked.keys
        for name in names[len(keys) : end]:
            keys.append(key_of(bytes(name), self._identity))
        return keys

    def _describe(self, tracked: _Tracked, index: int) -> None:
        """For routers, which are told of tokens."""
        if self._events is None or self._events.knows(number := hash_of(tracked.keys[index])):
            return
        request, names = tracked.request, tracked.request.block_hashes
        start, end = index * self._block_size, (index + 1) * self._block_size
        self._events.describe(
            Described(
                number=number,
                name=bytes(names[index]),
                parent=bytes(names[index - 1]) if index else None,
                tokens=packed_tokens(request.all_token_ids[start:end]),
                extra_keys=self._extra_keys(request, start, end),
            )
        )

    # --- what a request finds

    def find(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens that can be brought beyond those that are there. The last one of a prompt is always computed."""
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        tracked.request, tracked.num_here = request, num_computed_tokens // self._block_size
        if num_computed_tokens % self._block_size or request.lora_request is not None:
            return 0  # what an adapter is made of is not in the names: it may have been trained since
        if tracked.loaded_after == request.num_preemptions:
            return 0  # they did not come: it is computed
        most = (request.num_tokens - 1) // self._block_size
        first = tracked.num_here
        tracked.loads = []
        for index, key in enumerate(self._keys(tracked, most)[first:most], first):
            tier = self.tier_of(key)
            if tier is None:
                break
            self._describe(tracked, index)
            tracked.loads.append(tier)
        del tracked.loads[self._num_worth(tracked) :]
        return len(tracked.loads) * self._block_size

    def _num_worth(self, tracked: _Tracked) -> int:
        num_here, num_found = tracked.num_here, len(tracked.loads)
        if tracked.weighed is None or tracked.weighed[:2] != (num_here, num_found):
            num_worth = self._worth.judge(tracked.request.num_tokens, num_here, tracked.loads)
            tracked.weighed = (num_here, num_found, num_worth)
        return tracked.weighed[2]

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
        tracked.num_seen, tracked.num_before = end, first
        tracked.is_loading, tracked.loaded_after = True, request.num_preemptions
        self.num_brought += end - first

    def tiers_of_load(self, request_id: str) -> Counter[Tier]:
        """Where the blocks lay that were brought for it last."""
        tracked = self._requests.get(request_id)
        return Counter(tracked.loads) if tracked is not None else Counter()

    @staticmethod
    def _move(keys: list[BlockKey], index: int, blocks: list[int]) -> Move:
        return Move(keys[index], keys[index - 1] if index else None, index, blocks[index])

    # --- steps

    def orders(self, output: Any) -> Orders:
        """For the step that vLLM has planned."""
        self._orders.preempted |= output.preempted_req_ids or set()
        step = StepStats()
        for each in output.scheduled_new_reqs:
            tracked = self._requests.get(each.req_id)
            if tracked is not None:
                tracked.blocks = list(each.block_ids[0])
                # Of what was to be brought some may not have come: those are computed, and kept again.
                tracked.num_seen = min(tracked.num_seen, each.num_computed_tokens // self._block_size)
                self._count(tracked, each.num_computed_tokens // self._block_size)
                step = self._store(each.req_id, tracked, each.num_computed_tokens, output, step)
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
            step = self._store(request_id, tracked, cached.num_computed_tokens[place], output, step)
        orders, self._orders = self._orders, Orders()
        if step.prefill_tokens:
            orders.timed = next(self._numbers)
            self._timed[orders.timed] = step
            while len(self._timed) > _MOST_TIMED:
                del self._timed[next(iter(self._timed))]
        return orders

    def _count(self, tracked: _Tracked, num_here: int) -> None:
        """Of a prompt's blocks, those that came from tiers. It begins, and so many are here."""
        if not tracked.is_counted:
            tracked.is_counted = True
            num_came = max(num_here - tracked.num_before, 0) if tracked.loaded_after is not None else 0
            by_tier = Counter(tracked.loads[:num_came])
            num_asked = tracked.request.num_prompt_tokens // self._block_size
            self.hits.add(num_asked, tuple(by_tier.items()))

    def _store(
        self, request_id: str, tracked: _Tracked, num_computed: int, output: Any, step: StepStats
    ) -> StepStats:
        """Order down what the step completes of a request; the step with its part."""
        tracked.is_loading = False
        num_tokens = output.num_scheduled_tokens.get(request_id, 0)
        num_done = num_computed + num_tokens
        if tracked.request.lora_request is None:
            self._order_down(request_id, tracked, num_done)
        if num_computed + 1 < tracked.request.num_tokens:
            return msgspec.structs.replace(
                step,
                prefill_tokens=step.prefill_tokens + num_tokens,
                prefill_context=step.prefill_context + num_tokens * num_done,
            )
        return msgspec.structs.replace(
            step, batch=step.batch + 1, context_tokens=step.context_tokens + num_done
        )

    def _order_down(self, request_id: str, tracked: _Tracked, num_done: int) -> None:
        end = min(num_done // self._block_size, len(tracked.blocks))
        keys = self._keys(tracked, end)
        end = min(end, len(keys))
        moves: list[Move] = []
        for index in range(tracked.num_seen, end):
            if self.tier_of(keys[index]) is None:
                self._describe(tracked, index)
                moves.append(self._move(keys, index, tracked.blocks))
        tracked.num_seen = max(end, tracked.num_seen)
        if moves:
            self._orders.stores[request_id] = moves
            self._storing.add(request_id)

    def clear(self) -> None:
        """The workers forget all; what is believed here goes with what they tell."""
        self._orders.clear = True

    def found(self, by_worker: Iterable[Told]) -> None:
        """What each worker's tiers had when it began: as if they had told it with one step."""
        self.told(reduce(Told.aggregate, by_worker, Told()))

    def told(self, told: Told) -> None:
        copies = list(dict.fromkeys([*told.stored, *told.removed]))
        were_there = [self._is_there(copy) for copy in copies]
        self._copies.update(told.stored)
        self._copies.subtract(told.removed)
        for copy, was_there in zip(copies, were_there, strict=True):
            is_there = self._is_there(copy)
            if self._copies[copy] <= 0:
                del self._copies[copy]
            if is_there != was_there:
                tier, number = copy
                self.num_there[tier] += 1 if is_there else -1
                if self._events is not None:
                    self._events.moved(tier, number, is_there=is_there)
        if copies and self._events is not None:
            self._events.settle()
        for tier, figures in told.figures.items():
            before = self.figures.get(tier, figures)  # counts never shrink, speeds are of lately
            self.figures[tier] = replace(figures.most(before), block_s=figures.block_s)
        self._worth.block_s = {tier: each.block_s for tier, each in self.figures.items()}
        for timed, took_s in told.step_s.items():
            if (step := self._timed.pop(timed, None)) is not None:
                self._worth.times.add(msgspec.structs.replace(step, time_s=took_s))

    def finished(self, request_id: str) -> bool:
        """Whether its blocks must stay for a while."""
        tracked = self._requests.pop(request_id, None)
        is_storing = request_id in self._storing
        self._storing.discard(request_id)
        if not is_storing or (tracked is not None and tracked.is_loading):
            return False
        self._orders.awaited.add(request_id)
        return True
