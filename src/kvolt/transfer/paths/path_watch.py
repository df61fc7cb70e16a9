"""PathWatch: measured path speeds per peer host, path selection and slow-path reports.

Fed by every completed read and by self-tests. Each slow path is logged once per host with cause and remedy, and
counted. Knows no connection.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from kvolt.core.card import MeasuredLink
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.paths.capabilities import PathCapabilities
from kvolt.transfer.paths.fallbacks import find_fallback, table_route
from kvolt.transfer.paths.lanes import Place
from kvolt.transfer.paths.link_speeds import LinkSpeeds
from kvolt.transfer.paths.path_choice import MIN_PROVEN_READS, PathChoice, choose, lane_name
from kvolt.transfer.paths.routes import Sides, TransferRoute

log = logging.getLogger(__name__)

SPEED_CHANGE_FACTOR = 1.5
"""Ratio to the last reported speed of a link that triggers a new report."""
_MAX_REPORTED = 1024
"""Logged slow paths; further ones are only counted."""
_MAX_PAIRS = 1024
_TRIAL_INTERVAL = 8
"""Reads between two trials of the challenger; doubled after each trial beyond the first few."""
_MAX_TRIAL_INTERVAL = 256


class PathOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Path settings of one agent."""

    capabilities: PathCapabilities
    self_test: bool = False
    """Test the paths to a peer after the first read from it, and allow peers to test paths to this agent."""


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """Peer that is read from, on one connection."""

    host: str
    """Host of the peer; the local host if the peer is on it."""
    agent: str
    capabilities: PathCapabilities
    is_near: bool = False
    """Reached over its Unix socket, so its shared memory can be mapped."""


@dataclass(slots=True)
class _CachedChoice:
    """A choice and the countdown to the next trial of its challenger."""

    choice: PathChoice
    num_trials: int = 0
    interval: int = _TRIAL_INTERVAL
    num_left: int = _TRIAL_INTERVAL
    is_stale: bool = False
    """To be recomputed, because a link speed changed."""

    def next_path(self) -> str:
        if self.choice.challenger is None:
            return self.choice.path
        self.num_left -= 1
        if self.num_left:
            return self.choice.path
        self.num_trials += 1
        if self.num_trials > MIN_PROVEN_READS:
            self.interval = min(2 * self.interval, _MAX_TRIAL_INTERVAL)
        self.num_left = self.interval
        return self.choice.challenger


class Endpoints(msgspec.Struct, frozen=True):
    """Source and destination memory: kinds and device names."""

    source: MemoryKind
    destination: MemoryKind
    source_device: str | None = None
    destination_device: str | None = None


class TransferPath(msgspec.Struct, frozen=True):
    """Endpoints and path name."""

    endpoints: Endpoints
    name: str


class _Pair:
    """Memory of a peer and local memory.

    Cached, because planning takes about a millisecond, as long as a small read.
    """

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.choices: dict[tuple[str, ...], _CachedChoice] = {}

    @cached_property
    def table_route(self) -> TransferRoute | None:
        return table_route(self.sides)


class PathWatch:
    """See the module. Thread-safe."""

    def __init__(self, host: str, agent: str, capabilities: PathCapabilities) -> None:
        self.capabilities = capabilities
        self.on_speed_change: Callable[[], object] = _nothing
        """Called in the progress thread when `links` has changed significantly."""
        self.on_tested: Callable[[], object] = _nothing
        """Called in the progress thread after a self-test."""
        self._host = host
        self._agent = agent
        self._lock = threading.Lock()
        self._speeds = LinkSpeeds()
        self._reported_speeds: dict[tuple[str, str], float] = {}
        """Last reported speed, by host and lane."""
        self._reported: set[tuple[str, str, tuple[str, ...]]] = set()
        self._num_slow: Counter[tuple[str, str]] = Counter()
        self._pairs: dict[tuple[Peer, Endpoints], _Pair] = {}

    def peer(self, host: str, agent: str, is_near: bool, capabilities: PathCapabilities) -> Peer:
        """`is_near`: reached over its Unix socket, so on this host."""
        return Peer(self._host if is_near else host, agent, capabilities, is_near)

    def observe(self, peer: Peer, path: TransferPath, num_bytes: int, seconds: float) -> None:
        """Record a completed read."""
        with self._lock:
            name = lane_name(self._pair(peer, path.endpoints).sides, path.name)
            if name is None:
                return
            self._speeds.observe(peer.host, name, num_bytes, seconds)
            is_change = self._is_speed_change(peer.host, name)
            if is_change or self._speeds.num_large(peer.host, name) == MIN_PROVEN_READS:
                for pair in self._pairs.values():
                    for cached in pair.choices.values():
                        cached.is_stale = True
        if is_change:
            self.on_speed_change()

    def _is_speed_change(self, host: str, lane: str) -> bool:
        now = self._speeds.expected(host, lane)
        if now is None:
            return False
        before = self._reported_speeds.get((host, lane))
        if (
            before is not None
            and before / SPEED_CHANGE_FACTOR < now.bytes_per_s < before * SPEED_CHANGE_FACTOR
        ):
            return False
        if len(self._reported_speeds) > 2 * len(self._speeds):  # most belong to evicted links
            self._reported_speeds.clear()
        self._reported_speeds[host, lane] = now.bytes_per_s
        return True

    def check_fallback(self, peer: Peer, path: TransferPath) -> None:
        """Log and count `path` if it is a slow one for this peer."""
        with self._lock:
            pair = self._pair(peer, path.endpoints)
            fallback = find_fallback(pair.sides, path.name, self._speeds, pair.table_route)
            # Both sides support the faster path: it was left for its measured speed, or another one is on trial.
            if fallback is None or (peer.is_near and fallback.is_choice):
                return
            for name in fallback.names:
                self._num_slow[path.name, name] += 1
            key = (peer.host, path.name, fallback.names)
            is_new = key not in self._reported and len(self._reported) < _MAX_REPORTED
            if is_new:
                self._reported.add(key)
        if is_new:
            log.warning("slow transfer path: host=%s %s", peer.host, fallback)

    def links(self, max_links: int | None = None) -> dict[str, MeasuredLink]:
        """Measured speeds in the form of `EngineInfo.links`, of at most `max_links` links."""
        with self._lock:
            return self._speeds.links(max_links)

    def slow_paths(self) -> dict[tuple[str, str], int]:
        """Number of slow peers by (path, missing capability)."""
        with self._lock:
            return dict(self._num_slow)

    def choose_path(self, peer: Peer, endpoints: Endpoints, paths: Sequence[str]) -> str:
        """Select one of the usable `paths` for the next read."""
        if len(paths) == 1:
            return paths[0]
        with self._lock:
            pair, key = self._pair(peer, endpoints), tuple(paths)
            cached = pair.choices.get(key)
            if cached is None or cached.is_stale:
                current = "" if cached is None else cached.choice.path
                # Restart trials, so that a path that became faster is noticed soon.
                cached = _CachedChoice(choose(pair.sides, paths, self._speeds, current=current))
                pair.choices[key] = cached
            return cached.next_path()

    def _pair(self, peer: Peer, endpoints: Endpoints) -> _Pair:
        pair = self._pairs.get((peer, endpoints))
        if pair is None:
            if len(self._pairs) >= _MAX_PAIRS:
                self._pairs.clear()
            source = Place(
                kind=endpoints.source, host=peer.host, process=peer.agent, device=endpoints.source_device
            )
            destination = Place(
                kind=endpoints.destination,
                host=self._host,
                process=self._agent,
                device=endpoints.destination_device,
            )
            sides = Sides(source, destination, self.capabilities, peer.capabilities)
            pair = self._pairs[peer, endpoints] = _Pair(sides)
        return pair


def _nothing() -> None: ...
