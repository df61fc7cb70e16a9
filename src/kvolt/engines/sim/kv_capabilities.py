"""KvCapabilities: what a SimEngine does besides requests and steps: KV blocks, their transfers, remote prefills.

Times of transfers come from the links; held and received blocks expire on the running event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from kvolt.core.block_key import BlockKeyContext, KvLayout
from kvolt.core.card import ModelCard
from kvolt.core.errors import ErrorInfo, Unsupported, from_info
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import Stored
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import AttachedKv, HeldKv, KvAllocation, SealedKv
from kvolt.engines.kv_exchange import KvExchange
from kvolt.engines.prefills import Prefills
from kvolt.engines.sim.arguments import SimArguments, links_of
from kvolt.engines.sim.kv import SimMemory, TraceNaming, key_context, layout
from kvolt.engines.sim.transfers import NETWORK_IN, SimTransfers
from kvolt.engines.wakeup import Wakeup
from kvolt.kv import BlockPool
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.step_plan import Limits
from kvolt.transfer.memory.slabs import Slab

R = TypeVar("R")


class KvCapabilities:
    """See the module. SimEngine adds requests and steps."""

    def __init__(self, card: ModelCard, arguments: SimArguments) -> None:
        self.card = card
        self._arguments = arguments
        limits = Limits(
            max_num_seqs=arguments.max_num_seqs,
            max_batch_tokens=arguments.max_batch_tokens,
            max_waiting=arguments.max_waiting,
            context_length=arguments.context_length,
            block_size=arguments.block_size,
        )
        self._scheduler = Scheduler(
            BlockPool(arguments.kv_blocks, arguments.kv_events),
            limits,
            card.eos_token_ids,
            self._keys_of,
            arguments.scheduling,
            (lambda request: TraceNaming(request, arguments.block_size)) if arguments.trace_blocks else None,
        )
        self._memory = SimMemory()
        self._slab: Slab | None = None
        self._exchange = KvExchange(self._scheduler)
        self._transfers = SimTransfers(links_of(arguments), now)
        self._prefills = Prefills(self._scheduler, self._drop, now, arguments.hold_s)
        self._expiry: asyncio.TimerHandle | None = None
        self._work = Wakeup()
        """Set by every change that may allow a step or must be reported."""
        self._is_closed = False

    def _keys_of(self, request: Request) -> BlockKeyContext:
        return key_context(self.card.name, self._arguments.block_size, request)

    def _add(self, request: Request, keep_blocks: bool) -> None:
        raise NotImplementedError

    def _drop(self, request_id: RequestId) -> None:
        raise NotImplementedError

    # --- KvEvents, KvVisible, KvMovable

    async def clear_kv(self) -> int:
        num_blocks = self._scheduler.clear()
        self._work.set()
        return num_blocks

    async def match(self, request: Request) -> int:
        return self._exchange.match(request)

    async def kv_contents(self) -> tuple[Stored, ...]:
        return self._exchange.contents()

    def kv_layout(self) -> KvLayout:
        return layout(self._arguments.block_size)

    def kv_keys(self, request: Request) -> tuple[BlockKey, ...]:
        return tuple(self._exchange.keys(request))

    # --- KvAddressable

    def kv_slabs(self) -> tuple[Slab, ...]:
        if self._arguments.trace_blocks:
            raise Unsupported("trace blocks have no content", feature="kv_slabs")
        if self._slab is None:
            self._slab = self._memory.share(self._arguments.kv_blocks, self._arguments.block_size)
        return (self._slab,)

    async def held_kv(self, request_id: RequestId) -> HeldKv:
        return self._exchange.held(request_id)

    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        result: asyncio.Future[HeldKv] = asyncio.get_running_loop().create_future()
        self._prefills.watch(request_id, after, lambda outcome: _resolve(result, outcome))
        self._prefills.notify_watchers()
        return await result

    async def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        return self._exchange.allocate_kv(keys, hashes)

    async def commit_kv(
        self, allocation: KvAllocation, num_filled: int, keep_for: RequestId | None = None
    ) -> None:
        if not await self._transfers.move(self._size(num_filled), NETWORK_IN):
            num_filled = 0
        if self._is_closed:
            keep_for = None
        self._exchange.commit(allocation, num_filled, keep_for, self._prefills.expires_at)
        self._schedule_expiry()
        self._work.set()

    # --- KvTierable

    async def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        sealed = self._exchange.pin_sealed(name, self._prefills.hold_s)
        if sealed:
            self._prefills.start_hold(name)
            self._schedule_expiry()
        return sealed

    async def attach_kv(self, allocation: KvAllocation, num_last: int, request_id: RequestId) -> AttachedKv:
        attached = self._exchange.attach(allocation, num_last, request_id)
        self._work.set()
        return attached

    def _size(self, num_blocks: int) -> int:
        """Simulated size of this many blocks."""
        return num_blocks * self._arguments.block_size * self._arguments.kv_bytes_per_token

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        result: asyncio.Future[Handoff] = asyncio.get_running_loop().create_future()
        self._prefills.start(
            request,
            lambda short: self._add(short, keep_blocks=True),
            lambda outcome: _resolve(result, outcome),
        )
        try:
            return await result
        except asyncio.CancelledError:
            await self.release_prefill(request.request_id)
            raise

    async def release_prefill(self, request_id: RequestId) -> None:
        self._prefills.release(request_id)
        self._schedule_expiry()
        self._work.set()

    def _schedule_expiry(self) -> None:
        """Set the timer for the next expiry of held or prefetched blocks."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        expires_at = self._prefills.next_expiry
        if expires_at is not None:
            self._expiry = asyncio.get_running_loop().call_at(expires_at, self._on_expiry)

    def _on_expiry(self) -> None:
        self._prefills.expire()
        self._schedule_expiry()
        self._work.set()


def now() -> float:
    return asyncio.get_running_loop().time()


def _resolve(future: asyncio.Future[R], outcome: R | ErrorInfo) -> None:
    if future.done():
        return  # its caller was cancelled
    if isinstance(outcome, ErrorInfo):
        future.set_exception(from_info(outcome))
    else:
        future.set_result(outcome)
