"""`file` discovery: a directory shared by the processes of one host; no server.

Owns the tasks: one keep-alive task per lease, which renews it and restores missing keys, and one poller for all
watches. `directory` does the file operations, `view` decides which leases are alive.

    put / renew ----> Directory (one blocking call at a time) ----> files
                          ^
    poller ---- scan -----+----> View ---- changes ----> watch queues

Loss of the directory (removed, read-only, full, hung) is DiscoveryLost for a caller, silence for a watch, and a
retry for the tasks. Must not depend on the meaning of keys.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvolt.core.errors import (
    DeadlineExceeded,
    DiscoveryLost,
    KeyConflict,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from kvolt.runtime.blocking_lane import BlockingLane
from kvolt.runtime.clock import Blocking, Clock, new_id
from kvolt.runtime.discovery.directory import MAX_VALUE_BYTES, Directory, OwnedKey, Signature
from kvolt.runtime.discovery.port import LeaseId, WatchEvent, check_key
from kvolt.runtime.discovery.store_state import StoreState
from kvolt.runtime.discovery.view import DEAD_TTLS_KEPT, LeaseObservation, Record, View
from kvolt.runtime.discovery.watch import Watches
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

_RELIST_S = 1.0
"""Interval for listing unconditionally: a folder's mtime may miss a change within one tick of the kernel's clock."""

_RETRY_S = 1.0


@dataclass(slots=True)
class _OwnLease:
    ttl_s: float
    keepalive: asyncio.Task[Any] | None = None
    keys: dict[str, OwnedKey] = field(default_factory=dict)
    on_lost: dict[str, Callable[[], None]] = field(default_factory=dict)
    tombstones: dict[str, float] = field(default_factory=dict)
    """Deleted keys with the time of deletion."""
    has_uncertain_write: bool = False
    """A write timed out: it may have happened, or may happen late."""


class FileDiscovery:
    """A process's client of a shared directory. `on_state` gets False when it is lost and True when it is back."""

    def __init__(
        self,
        directory: str | Path,
        clock: Clock,
        blocking: Blocking,
        rng: random.Random,
        poll_s: float = 0.25,
        *,
        timeout_s: float = 2.0,
        on_state: Callable[[bool], None] | None = None,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._poll_s = poll_s
        self._root = Path(directory)
        self._directory = Directory(self._root, new_id(rng))
        self._is_directory_ready = False
        self._lane = BlockingLane(blocking, clock, timeout_s)
        # Guards the lane and the record of own leases. Waiting for it is bounded by the lane's time-out: once a
        # call hangs, the calls behind it fail at once.
        self._lock = asyncio.Lock()
        # Reads and writes are tracked separately: on a full disk reads still work and must not hide failing writes.
        self._state = StoreState(f"directory={self._root}", on_state)
        self._view = View(max_step_s=4 * poll_s)
        self._watches = Watches()
        self._leases: dict[LeaseId, _OwnLease] = {}
        self._task_group = TaskGroup("discovery-file")
        self._polling = False
        self._poll_now = asyncio.Event()
        self._relisted_at = -_RELIST_S
        self._closed = False

    # -- the port

    async def lease(self, ttl_s: float, name: LeaseId | None = None) -> LeaseId:
        is_continued = name is not None
        name = name or LeaseId(new_id(self._rng))
        async with self._lock:
            self._check_open()
            if name in self._leases:
                return name
            stamp_ns = self._stamp()
            await self._do("write", lambda: self._directory.write_lease(name, ttl_s, stamp_ns))
            # Keys of the previous process that are not put again are removed by the first renewal.
            own = self._leases[name] = _OwnLease(ttl_s, has_uncertain_write=is_continued)
            if not self._closed:
                own.keepalive = self._task_group.start(self._keep_alive(name, ttl_s), f"keeper-{name}")
        return name

    async def put(
        self, key: str, value: bytes, lease: LeaseId, on_lost: Callable[[], None] | None = None
    ) -> None:
        _check_entry(key, value)
        async with self._lock:
            self._check_open()
            own = self._leases.get(lease)
            if own is None:
                raise NotFound("no such lease in this process", kind="lease", name=lease)
            signature = await self._write_record(Record(key, lease, value), own)
            for other in self._leases.values():
                other.tombstones.pop(key, None)
            own.keys[key] = OwnedKey(value, signature)
            own.on_lost.pop(key, None)
            if on_lost is not None:
                own.on_lost[key] = on_lost

    async def delete(self, key: str) -> None:
        async with self._lock:
            self._check_open()
            for lease, own in self._leases.items():
                if key in own.keys:
                    # Before the attempt: even if it fails, the key must not be restored.
                    del own.keys[key]
                    own.on_lost.pop(key, None)
                    own.tombstones[key] = self._clock.monotonic()
                    with suppress(KeyConflict):  # another lease owns the key by now
                        await self._write_record(Record(key, lease, None), own)
                    return

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        self._check_open()
        self._start_polling()
        await self._read(relist=True)
        return self._view.content(prefix)

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        queue = self._watches.open(prefix)
        if not self._closed:
            self._start_polling()
            self._poll_now.set()
        return queue

    async def revoke(self, lease: LeaseId) -> None:
        async with self._lock:
            await self._end(lease)

    async def close(self) -> None:
        if self._closed:
            return
        await self._stop()
        async with self._lock:
            for lease in list(self._leases):
                with suppress(DiscoveryLost):
                    await self._end(lease)

    async def abandon(self) -> None:
        """Stop without revoking, like a crash: the leases expire after their ttl. For tests."""
        await self._stop()
        self._leases.clear()

    # -- owning

    async def _write_record(self, record: Record, own: _OwnLease) -> Signature:
        stamp_ns, has_uncertain_write, wall_s = self._stamp(), own.has_uncertain_write, self._clock.wall()

        def is_alive(lease: LeaseId, observation: LeaseObservation) -> bool:
            # After a pause of the machine every lease would look expired by the clock alone.
            return wall_s - observation.mtime_ns / 1e9 < observation.ttl_s or self._view.is_alive(lease)

        own.has_uncertain_write = True
        try:
            signature = await self._do("write", lambda: self._directory.claim(record, stamp_ns, is_alive))
        except KeyConflict:
            own.has_uncertain_write = has_uncertain_write
            raise
        own.has_uncertain_write = has_uncertain_write
        return signature

    async def _keep_alive(self, lease: LeaseId, ttl_s: float) -> None:
        delay_s = ttl_s / 3
        while True:
            await asyncio.sleep(delay_s)
            try:
                await self._renew(lease)
                delay_s = ttl_s / 3
            except DiscoveryLost:
                delay_s = min(ttl_s / 3, _RETRY_S)

    async def _renew(self, lease: LeaseId) -> None:
        async with self._lock:
            own = self._leases.get(lease)
            if own is None:
                return
            keys, stamp_ns = dict(own.keys), self._stamp()
            rewrite = own.has_uncertain_write or self._state.is_failing("write")
            renewal = await self._do(
                "write", lambda: self._directory.renew(lease, own.ttl_s, keys, stamp_ns, rewrite)
            )
            own.has_uncertain_write = False
            own.keys.update(renewal.keys)
            if renewal.keys and not rewrite:
                log.warning("discovery keys missing or damaged; restored: keys=%s", list(renewal.keys))
            for key in renewal.lost:
                del own.keys[key]
                on_lost = own.on_lost.pop(key, None)
                if on_lost is not None:
                    on_lost()
            await self._remove_tombstones(lease, own)

    async def _remove_tombstones(self, lease: LeaseId, own: _OwnLease) -> None:
        now = self._clock.monotonic()
        old = [key for key, since in own.tombstones.items() if now - since > DEAD_TTLS_KEPT * own.ttl_s]
        for key in old:
            await self._do("write", partial(self._directory.remove_key, key, lease))
            del own.tombstones[key]

    async def _end(self, lease: LeaseId) -> None:
        own = self._leases.pop(lease, None)
        if own is None:
            return
        if own.keepalive is not None:
            own.keepalive.cancel()
        keys = [*own.keys, *own.tombstones]
        await self._do("write", lambda: self._directory.end_lease(lease, keys))

    # -- reading

    def _start_polling(self) -> None:
        if not self._polling:
            self._polling = True
            self._task_group.start(self._poll(), "poller")

    async def _poll(self) -> None:
        while True:
            self._poll_now.clear()
            with suppress(DiscoveryLost):
                await self._read()
                await self._remove_garbage()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._poll_now.wait()

    async def _read(self, relist: bool = False) -> None:
        """Scan, publish changes to the open watches, and give new watches their initial content."""
        async with self._lock:
            new_watches = self._watches.not_started()
            now = self._clock.monotonic()
            relist = relist or bool(new_watches) or now - self._relisted_at >= _RELIST_S
            try:
                snapshot = await self._do("read", lambda: self._directory.scan(relist))
            except DiscoveryLost:
                self._view.mark_unreadable()
                raise
            if relist:
                self._relisted_at = now
            changes = self._view.apply_snapshot(snapshot, self._clock.monotonic(), self._clock.wall())
            self._watches.publish(changes)
            for queue in new_watches:
                queue.set_initial(self._view.content(queue.prefix))

    async def _remove_garbage(self) -> None:
        leases = self._view.collect_dead_leases()
        if leases:
            async with self._lock:
                await self._do("read", lambda: self._directory.remove_dead(leases))

    # -- both

    async def _stop(self) -> None:
        self._closed = True
        self._watches.close()
        await self._task_group.close()

    async def _do(self, side: str, operation: Callable[[], T]) -> T:
        """Run one file operation; the caller holds the lock."""
        created, wall_s = self._is_directory_ready, self._clock.wall()

        def attempt() -> T:
            if not created:
                self._directory.ensure(wall_s)
            return operation()

        try:
            result = await self._lane.run(attempt)
        except (OSError, DeadlineExceeded, Overloaded, Unavailable) as error:
            self._is_directory_ready = False
            reason = str(error)
            self._state.mark_failed(side, reason)
            raise DiscoveryLost(
                f"discovery directory {self._root}: {reason}", address=str(self._root)
            ) from error
        self._is_directory_ready = True
        self._state.mark_working(side)
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise DiscoveryLost("this discovery client is closed", address=str(self._root))

    def _stamp(self) -> int:
        """Current time as mtime in nanoseconds; the bits below one millisecond are random."""
        return (int(self._clock.wall() * 1e9) & ~0xFFFFF) | self._rng.getrandbits(20)


def _check_entry(key: str, value: bytes) -> None:
    check_key(key)
    if len(value) > MAX_VALUE_BYTES:
        raise PayloadTooLarge(
            "value too large for discovery", limit_bytes=MAX_VALUE_BYTES, size_bytes=len(value)
        )
