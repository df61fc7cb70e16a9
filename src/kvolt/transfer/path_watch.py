"""PathWatch: how fast blocks really come from each peer's host, and where they take a slow path for want of something.

Fed with every read that has ended well, and by self-tests. A slow path is told once for each host, loudly, with its
cause and remedy, and counted. Knows no connection.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

import msgspec

from kvolt.core.card import Link
from kvolt.transfer.capabilities import Capabilities
from kvolt.transfer.fallbacks import find_fallback, lane_taken
from kvolt.transfer.lanes import MemoryKind, Place
from kvolt.transfer.link_speeds import LinkSpeeds

log = logging.getLogger(__name__)

NEWS = 1.5
"""A link that is so many times as fast or as slow as it was when others were told of it is news."""
_MAX_TOLD = 1024
"""Slow paths that were told; those after them are counted only."""
_WATCHED = frozenset((MemoryKind.HOST, MemoryKind.SHARED, MemoryKind.PINNED))


class PathOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of one agent."""

    can: Capabilities
    self_test: bool = False
    """Whether paths are tested when a peer is first read from, and may be by others."""


class Peer(msgspec.Struct, frozen=True):
    """Whoever is read from."""

    host: str
    """Ours, where it is on this one."""
    agent: str
    can: Capabilities


class Way(msgspec.Struct, frozen=True):
    """From which kind of memory to which, and over which path."""

    source: MemoryKind
    destination: MemoryKind
    path: str

    @property
    def is_watched(self) -> bool:
        return {self.source, self.destination} <= _WATCHED


class PathWatch:
    """See the module. From any thread."""

    def __init__(self, host: str, agent: str, can: Capabilities) -> None:
        self.can = can
        self.on_news: Callable[[], object] = _nothing
        """`links` has something new to say. Called in the thread that moves blocks."""
        self.on_tested: Callable[[], object] = _nothing
        """A self-test with a peer is over. As above."""
        self._host = host
        self._agent = agent
        self._lock = threading.Lock()
        self._speeds = LinkSpeeds()
        self._news: dict[tuple[str, str], float] = {}
        """By host and lane: the speed that was news last."""
        self._told: set[tuple[str, str, tuple[str, ...]]] = set()
        self._num_slow: Counter[tuple[str, str]] = Counter()

    def peer(self, host: str, agent: str, is_near: bool, can: Capabilities) -> Peer:
        """`is_near`: known to be on our host. One that tells our own address is, too."""
        return Peer(self._host if is_near else host, agent, can)

    def observe(self, peer: Peer, way: Way, num_bytes: int, seconds: float) -> None:
        """A read has ended well."""
        if not way.is_watched:
            return
        source, destination = self._places(peer, way)
        lane = lane_taken(source, destination, way.path, self.can, peer.can)
        if lane is None:
            return
        with self._lock:
            self._speeds.observe(peer.host, lane.name, num_bytes, seconds)
            is_news = self._is_news(peer.host, lane.name)
        if is_news:
            self.on_news()

    def _is_news(self, host: str, lane: str) -> bool:
        now = self._speeds.expected(host, lane)
        if now is None:
            return False
        before = self._news.get((host, lane))
        if before is not None and before / NEWS < now.bytes_per_s < before * NEWS:
            return False
        if len(self._news) > 2 * len(self._speeds):  # most are of links that were forgotten
            self._news.clear()
        self._news[host, lane] = now.bytes_per_s
        return True

    def judge(self, peer: Peer, way: Way) -> None:
        """Blocks came this way: tell it, and count it, where that is a slow one."""
        if not way.is_watched:
            return
        source, destination = self._places(peer, way)
        with self._lock:
            found = find_fallback(source, destination, way.path, self.can, peer.can, self._speeds)
            if found is None:
                return
            for name in found.names:
                self._num_slow[way.path, name] += 1
            key = (peer.host, way.path, found.names)
            is_new = key not in self._told and len(self._told) < _MAX_TOLD
            if is_new:
                self._told.add(key)
        if is_new:
            log.warning("blocks from %s take a slow path: %s", peer.host, found)

    def links(self, most: int | None = None) -> dict[str, Link]:
        """The speeds that are known, as `EngineInfo.links` tells them; of so many links at most."""
        with self._lock:
            return self._speeds.links(most)

    def slow_paths(self) -> dict[tuple[str, str], int]:
        """How many peers' blocks took a path for want of something, by both."""
        with self._lock:
            return dict(self._num_slow)

    def _places(self, peer: Peer, way: Way) -> tuple[Place, Place]:
        source = Place(kind=way.source, host=peer.host, process=peer.agent)
        return source, Place(kind=way.destination, host=self._host, process=self._agent)


def _nothing() -> None: ...
