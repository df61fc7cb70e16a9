"""PathWatch: how fast blocks really come from each peer's host, and where they take a slow path for want of something.

Fed with every read that has ended well, and by self-tests. A slow path is told once for each host, loudly, with its
cause and remedy, and counted. Knows no connection.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvolt.core.card import Link
from kvolt.transfer.paths.capabilities import Capabilities
from kvolt.transfer.paths.fallbacks import find_fallback, table_route
from kvolt.transfer.paths.lanes import MemoryKind, Place
from kvolt.transfer.paths.link_speeds import LinkSpeeds
from kvolt.transfer.paths.path_choice import PROVEN, Choice, choose, name_taken
from kvolt.transfer.paths.routes import Route

log = logging.getLogger(__name__)

NEWS = 1.5
"""A link that is so many times as fast or as slow as it was when others were told of it is news."""
_MAX_TOLD = 1024
"""Slow paths that were told; those after them are counted only."""
_MAX_CHOSEN = 1024
"""Paths that are remembered, by peer and memories."""
_TRIAL_EVERY = 8
"""Reads between two over the challenger of the path that is taken; doubled with each after the first few."""
_MOST_EVERY = 256


class PathOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of one agent."""

    can: Capabilities
    self_test: bool = False
    """Whether paths are tested when a peer is first read from, and may be by others."""


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """Whoever is read from, on one connection."""

    host: str
    """Ours, where it is on this one."""
    agent: str
    can: Capabilities
    is_near: bool = False
    """Its socket on this host was reached: its shared memory can be mapped."""


@dataclass(slots=True)
class _Chosen:
    """A choice, and when its challenger is read over next."""

    choice: Choice
    num_trials: int = 0
    every: int = _TRIAL_EVERY
    num_left: int = _TRIAL_EVERY

    def next_path(self) -> str:
        if self.choice.challenger is None:
            return self.choice.path
        self.num_left -= 1
        if self.num_left:
            return self.choice.path
        self.num_trials += 1
        if self.num_trials > PROVEN:
            self.every = min(2 * self.every, _MOST_EVERY)
        self.num_left = self.every
        return self.choice.challenger


class Ends(msgspec.Struct, frozen=True):
    """From which memory to which: the kinds, and of devices which."""

    source: MemoryKind
    destination: MemoryKind
    source_device: str | None = None
    destination_device: str | None = None


class Way(msgspec.Struct, frozen=True):
    """From which memory to which, and over which path."""

    ends: Ends
    path: str

    @property
    def is_watched(self) -> bool:
        return MemoryKind.FILE not in (self.ends.source, self.ends.destination)


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
        self._chosen: dict[tuple[Peer, Ends, tuple[str, ...]], _Chosen] = {}
        self._stale: set[tuple[Peer, Ends, tuple[str, ...]]] = set()
        """Chosen before something new was known of a link."""
        self._routes: dict[tuple[Peer, Ends], Route | None] = {}
        """By the table of lanes. Planning one takes about a millisecond, as long as a small read."""

    def peer(self, host: str, agent: str, is_near: bool, can: Capabilities) -> Peer:
        """`is_near`: known to be on our host. One that tells our own address is, too."""
        return Peer(self._host if is_near else host, agent, can, is_near)

    def observe(self, peer: Peer, way: Way, num_bytes: int, seconds: float) -> None:
        """A read has ended well."""
        if not way.is_watched:
            return
        source, destination = self._places(peer, way.ends)
        name = name_taken(source, destination, way.path, self.can, peer.can)
        if name is None:
            return
        with self._lock:
            self._speeds.observe(peer.host, name, num_bytes, seconds)
            is_news = self._is_news(peer.host, name)
            if is_news or self._speeds.num_large(peer.host, name) == PROVEN:
                self._stale.update(self._chosen)
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
        source, destination = self._places(peer, way.ends)
        with self._lock:
            route = self._table_route(peer, way.ends)
            found = find_fallback(source, destination, way.path, self.can, peer.can, self._speeds, route)
            # What both sides can do is not lacking: it was left for its speed, or another path is being tried.
            if found is None or (peer.is_near and found.is_choice):
                return
            for name in found.names:
                self._num_slow[way.path, name] += 1
            key = (peer.host, way.path, found.names)
            is_new = key not in self._told and len(self._told) < _MAX_TOLD
            if is_new:
                self._told.add(key)
        if is_new:
            log.warning("blocks from %s take a slow path: %s", peer.host, found)

    def _table_route(self, peer: Peer, ends: Ends) -> Route | None:
        key = (peer, ends)
        if key not in self._routes:
            if len(self._routes) >= _MAX_CHOSEN:
                self._routes.clear()
            self._routes[key] = table_route(*self._places(peer, ends), self.can, peer.can)
        return self._routes[key]

    def links(self, most: int | None = None) -> dict[str, Link]:
        """The speeds that are known, as `EngineInfo.links` tells them; of so many links at most."""
        with self._lock:
            return self._speeds.links(most)

    def slow_paths(self) -> dict[tuple[str, str], int]:
        """How many peers' blocks took a path for want of something, by both."""
        with self._lock:
            return dict(self._num_slow)

    def fastest(self, peer: Peer, ends: Ends, paths: Sequence[str]) -> str:
        """Of these paths, each of which blocks can take between the two: the one for the next read."""
        if len(paths) == 1:
            return paths[0]
        key = (peer, ends, tuple(paths))
        with self._lock:
            known = self._chosen.get(key)
            if known is None or key in self._stale:
                self._stale.discard(key)
                if len(self._chosen) >= _MAX_CHOSEN:
                    self._chosen.clear()
                    self._stale.clear()
                choice = self._choose(peer, ends, paths, "" if known is None else known.choice.path)
                # News begin the trials anew: a path that became faster is soon seen to be.
                known = self._chosen[key] = _Chosen(choice)
            return known.next_path()

    def _choose(self, peer: Peer, ends: Ends, paths: Sequence[str], taken: str) -> Choice:
        return choose(*self._places(peer, ends), paths, self.can, peer.can, self._speeds, taken=taken)

    def _places(self, peer: Peer, ends: Ends) -> tuple[Place, Place]:
        source = Place(kind=ends.source, host=peer.host, process=peer.agent, device=ends.source_device)
        return source, Place(
            kind=ends.destination, host=self._host, process=self._agent, device=ends.destination_device
        )


def _nothing() -> None: ...
