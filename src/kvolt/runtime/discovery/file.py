"""Discovery through a directory shared by the processes of one host: no server to run.

Owns the tasks: one keeper per lease, which renews it and puts back what is missing, and one poller
for all watches. The files are `discovery_directory`'s, the verdict on who lives is `discovery_view`'s.

    put / renew ----> Directory (one blocking call at a time) ----> files
                          ^
    poller ---- scan -----+----> View ---- changes ----> watch queues

Losing the directory (removed, read-only, full, hung) is DiscoveryLost for a caller, silence for a
watch, and a retry for keeper and poller. Must not know what the keys mean.
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
from kvolt.runtime.discovery.directory import MAX_VALUE_BYTES, Directory, OwnKey, Signature
from kvolt.runtime.discovery.port import LeaseId, WatchEvent, check_key
from kvolt.runtime.discovery.view import DEAD_TTLS_KEPT, LeaseSeen, Record, View
from kvolt.runtime.discovery.watch import Watches
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

T = TypeVar("T")

_RELIST_S = 1.0
"""A folder's mtime may miss a change within one tick of the kernel's clock: list it this often anyway."""

_RETRY_S = 1.0


@dataclass(slots=True)
class _OwnLease:
    ttl_s: float
    keeper: asyncio.Task[Any] | None = None
    keys: dict[str, OwnKey] = field(default_factory=dict)
    on_lost: dict[str, Callable[[], None]] = field(default_factory=dict)
    tombstones: dict[str, float] = field(default_factory=dict)
    """Deleted keys and when."""
    doubtful: bool = False
    """A write was given up: it may have happened, or happen late."""


class FileDiscovery:
    """One process's client of a shared directory. `on_state` is told when it is lost and when it is back."""

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
        self._directory_made = False
        self._lane = BlockingLane(blocking, clock, timeout_s)
        # Whoever holds the turn may use the lane and change what is recorded as our own. Waiting for it
        # is bounded by the lane's time-out: once a call hangs, those behind it fail at once.
        self._turn = asyncio.Lock()
        self._health = _Health(self._root, on_state)
        self._view = View(max_step_s=4 * poll_s)
        self._watches = Watches()
        self._own: dict[LeaseId, _OwnLease] = {}
        self._crew = Crew("discovery-file")
        self._polling = False
        self._poll_now = asyncio.Event()
        self._relisted_at = -_RELIST_S
        self._closed = False

    # -- the port

    async def lease(self, ttl_s: float, name: LeaseId | None = None) -> LeaseId:
        continued = name is not None
        name = name or LeaseId(new_id(self._rng))
        async with self._turn:
            self._check_open()
            if name in self._own:
                return name
            stamp_ns = self._stamp()
            await self._do("write", lambda: self._directory.write_lease(name, ttl_s, stamp_ns))
            # What it left behind and is not put again goes with the first renewal.
            own = self._own[name] = _OwnLease(ttl_s, doubtful=continued)
            if not self._closed:
                own.keeper = self._crew.start(self._keep(name, ttl_s), f"keeper-{name}")
        return name

    async def put(
        self, key: str, value: bytes, lease: LeaseId, on_lost: Callable[[], None] | None = None
    ) -> None:
        _check_entry(key, value)
        async with self._turn:
            self._check_open()
            own = self._own.get(lease)
            if own is None:
                raise NotFound("no such lease in this process", kind="lease", name=lease)
            signature = await self._write_record(Record(key, lease, value), own)
            for other in self._own.values():
                other.tombstones.pop(key, None)
            own.keys[key] = OwnKey(value, signature)
            own.on_lost.pop(key, None)
            if on_lost is not None:
                own.on_lost[key] = on_lost

    async def delete(self, key: str) -> None:
        async with self._turn:
            self._check_open()
            for lease, own in self._own.items():
                if key in own.keys:
                    # Before the attempt: even if it fails, the key must not be put back.
                    del own.keys[key]
                    own.on_lost.pop(key, None)
                    own.tombstones[key] = self._clock.monotonic()
                    with suppress(KeyConflict):  # it is another lease's key by now
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
        async with self._turn:
            await self._end(lease)

    async def close(self) -> None:
        if self._closed:
            return
        await self._stop()
        async with self._turn:
            for lease in list(self._own):
                with suppress(DiscoveryLost):
                    await self._end(lease)

    async def abandon(self) -> None:
        """Stop without revoking, as a crash would: the leases run out after their ttl. For tests."""
        await self._stop()
        self._own.clear()

    # -- owning

    async def _write_record(self, record: Record, own: _OwnLease) -> Signature:
        stamp_ns, doubtful, wall_s = self._stamp(), own.doubtful, self._clock.wall()

        def is_alive(lease: LeaseId, seen: LeaseSeen) -> bool:
            # After a pause of the whole machine the clock alone would call every lease dead.
            return wall_s - seen.mtime_ns / 1e9 < seen.ttl_s or self._view.believes_alive(lease)

        own.doubtful = True
        try:
            signature = await self._do("write", lambda: self._directory.claim(record, stamp_ns, is_alive))
        except KeyConflict:
            own.doubtful = doubtful
            raise
        own.doubtful = doubtful
        return signature

    async def _keep(self, lease: LeaseId, ttl_s: float) -> None:
        delay_s = ttl_s / 3
        while True:
            await asyncio.sleep(delay_s)
            try:
                await self._renew(lease)
                delay_s = ttl_s / 3
            except DiscoveryLost:
                delay_s = min(ttl_s / 3, _RETRY_S)

    async def _renew(self, lease: LeaseId) -> None:
        async with self._turn:
            own = self._own.get(lease)
            if own is None:
                return
            keys, stamp_ns = dict(own.keys), self._stamp()
            rewrite = own.doubtful or self._health.failing("write")
            renewal = await self._do(
                "write", lambda: self._directory.renew(lease, own.ttl_s, keys, stamp_ns, rewrite)
            )
            own.doubtful = False
            own.keys.update(renewal.keys)
            if renewal.keys and not rewrite:
                log.warning("discovery keys missing or damaged, written again: keys=%s", list(renewal.keys))
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
        own = self._own.pop(lease, None)
        if own is None:
            return
        if own.keeper is not None:
            own.keeper.cancel()
        keys = [*own.keys, *own.tombstones]
        await self._do("write", lambda: self._directory.end_lease(lease, keys))

    # -- reading

    def _start_polling(self) -> None:
        if not self._polling:
            self._polling = True
            self._crew.start(self._poll(), "poller")

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
        """Scan, tell the open watches what changed, and give those that wait their first content."""
        async with self._turn:
            new = self._watches.waiting()
            now = self._clock.monotonic()
            relist = relist or bool(new) or now - self._relisted_at >= _RELIST_S
            try:
                snapshot = await self._do("read", lambda: self._directory.scan(relist))
            except DiscoveryLost:
                self._view.lost()
                raise
            if relist:
                self._relisted_at = now
            changes = self._view.update(snapshot, self._clock.monotonic(), self._clock.wall())
            self._watches.publish(changes)
            for queue in new:
                queue.begin(self._view.content(queue.prefix))

    async def _remove_garbage(self) -> None:
        leases = self._view.garbage()
        if leases:
            async with self._turn:
                await self._do("read", lambda: self._directory.remove_dead(leases))

    # -- both

    async def _stop(self) -> None:
        self._closed = True
        self._watches.close()
        await self._crew.close()

    async def _do(self, side: str, work: Callable[[], T]) -> T:
        """One piece of file work; the caller holds the turn."""
        made, wall_s = self._directory_made, self._clock.wall()

        def attempt() -> T:
            if not made:
                self._directory.ensure(wall_s)
            return work()

        try:
            result = await self._lane.run(attempt)
        except (OSError, DeadlineExceeded, Overloaded, Unavailable) as error:
            self._directory_made = False
            reason = str(error)
            self._health.failed(side, reason)
            raise DiscoveryLost(
                f"discovery directory {self._root}: {reason}", address=str(self._root)
            ) from error
        self._directory_made = True
        self._health.works(side)
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise DiscoveryLost("this discovery client is closed", address=str(self._root))

    def _stamp(self) -> int:
        """An mtime in nanoseconds that is now to the millisecond and unique below it."""
        return (int(self._clock.wall() * 1e9) & ~0xFFFFF) | self._rng.getrandbits(20)


class _Health:
    """Whether the directory can be read and written; says so once per change.

    Two sides, since on a full disk reading goes on working: one success must not hide the other's failure.
    """

    def __init__(self, root: Path, on_state: Callable[[bool], None] | None) -> None:
        self._root = root
        self._on_state = on_state
        self._connected: bool | None = None
        self._failing: dict[str, None] = {}

    def failing(self, side: str) -> bool:
        return side in self._failing

    def failed(self, side: str, reason: str) -> None:
        self._failing[side] = None
        if self._connected is not False:
            log.warning("discovery directory %s is lost, going on with what is known: %s", self._root, reason)
            self._turn(connected=False)

    def works(self, side: str) -> None:
        self._failing.pop(side, None)
        if self._failing or self._connected:
            return
        if self._connected is False:
            log.warning("discovery directory %s is back", self._root)
        self._turn(connected=True)

    def _turn(self, connected: bool) -> None:
        self._connected = connected
        if self._on_state is not None:
            self._on_state(connected)


def _check_entry(key: str, value: bytes) -> None:
    check_key(key)
    if len(value) > MAX_VALUE_BYTES:
        raise PayloadTooLarge(
            "value too large for discovery", limit_bytes=MAX_VALUE_BYTES, size_bytes=len(value)
        )
