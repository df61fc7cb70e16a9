"""Commit or roll back imported blocks, even if the caller is cancelled. Used by handoffs and tiering."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId
from kvolt.engines.contract import KvAddressable, KvAllocation, Prefill
from kvolt.runtime.tasks import TaskGroup


class SettlingEngine(KvAddressable, Prefill, Protocol):
    """Engine interface of the settling."""


class KvSettling:
    """See the module."""

    def __init__(self, engine: SettlingEngine, task_group: TaskGroup) -> None:
        self._engine = engine
        self._task_group = task_group

    async def settle(self, allocation: KvAllocation, num_filled: int, keep_for: RequestId | None) -> None:
        """Commit the filled blocks and release the others. If the caller is cancelled nothing is kept."""
        kept = () if keep_for is None else (keep_for,)  # engine plugins may lack the parameter
        settling = self._task_group.start(self._engine.commit_kv(allocation, num_filled, *kept), "settle")
        try:
            await asyncio.shield(settling)
        except asyncio.CancelledError:
            if keep_for is not None:
                self.release_kept(keep_for, settling)
            raise

    def release_kept(self, request_id: RequestId, after: asyncio.Task[None] | None = None) -> None:
        """Release blocks kept for a request that is not submitted, once the task `after` has ended."""
        if not self._task_group.closed:
            self._task_group.start(self._release_kept(request_id, after), "release")

    async def _release_kept(self, request_id: RequestId, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        with contextlib.suppress(KvoltError):  # a dead engine holds nothing
            await self._engine.release_prefill(request_id)
