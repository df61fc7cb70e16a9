"""LinkSpeeds: how fast each path to each host really is, learned from the transfers that went over it. Pure.

A link is a peer's host and a path to it, by the name a route's hop gives it (`Hop.link`). Large transfers tell its
speed, small ones what an operation costs whatever its size; those between tell neither clearly and count for nothing.
Speed is bytes over seconds, both summed with older transfers fading, so that a large transfer counts for more.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvolt.core.card import Link

MAX_LINKS = 512
"""The one that was used longest ago makes room."""
LARGE_BYTES = 4 << 20
"""From here on a transfer tells the speed."""
SMALL_BYTES = 64 << 10
"""Up to here a transfer tells the cost of an operation."""

_FADING = 0.9
"""Of the weight of all earlier transfers, with each new one: about the last ten count."""


@dataclass(slots=True)
class _Measured:
    num_large: int = 0
    num_bytes: float = 0.0
    seconds: float = 0.0
    latency_s: float | None = None


class LinkSpeeds:
    """See the module."""

    def __init__(self, max_links: int = MAX_LINKS) -> None:
        self._max_links = max_links
        self._links: dict[tuple[str, str], _Measured] = {}
        """In order of use."""

    def __len__(self) -> int:
        return len(self._links)

    def observe(self, peer: str, path: str, num_bytes: int, seconds: float) -> None:
        """A transfer has ended well. One that tells nothing (by its size, or as no time passed) is left out."""
        is_large, is_small = num_bytes >= LARGE_BYTES, 0 < num_bytes <= SMALL_BYTES
        if not (is_large or is_small) or not 0 < seconds < float("inf"):
            return
        measured = self._links.pop((peer, path), None) or _Measured()
        self._links[peer, path] = measured
        if len(self._links) > self._max_links:
            del self._links[next(iter(self._links))]
        if is_small:
            before = measured.latency_s
            measured.latency_s = seconds if before is None else _FADING * before + (1 - _FADING) * seconds
            return
        # The first one also paid for a handshake and for pages never touched before: it stands until the second.
        fading = _FADING if measured.num_large != 1 else 0.0
        # A latency from a bad moment must not make a link look arbitrarily fast.
        moving_s = max(seconds - (measured.latency_s or 0.0), seconds / 2)
        measured.num_large += 1
        measured.num_bytes = fading * measured.num_bytes + num_bytes
        measured.seconds = fading * measured.seconds + moving_s

    def expected(self, peer: str, path: str) -> Link | None:
        """None while no large transfer has gone that way."""
        measured = self._links.get((peer, path))
        if measured is None or not measured.num_large:
            return None
        return Link(path, measured.num_bytes / measured.seconds, measured.latency_s or 0.0)

    def num_large(self, peer: str, path: str) -> int:
        """Transfers that told its speed."""
        measured = self._links.get((peer, path))
        return 0 if measured is None else measured.num_large

    def proven(self, least: int) -> LinkSpeeds:
        """Only of links that so many large transfers went over: one that met a bad moment tells little."""
        found = LinkSpeeds(self._max_links)
        found._links = {name: each for name, each in self._links.items() if each.num_large >= least}
        return found

    def forget(self, peer: str) -> None:
        """The peer has gone, or has come back as another machine."""
        for name in [name for name in self._links if name[0] == peer]:
            del self._links[name]

    def links(self, most: int | None = None) -> dict[str, Link]:
        """What is known, as `EngineInfo.links` tells it: by "path@peer", in order of that name.

        `most`: so many, those that were used last.
        """
        found = {f"{path}@{peer}": self.expected(peer, path) for peer, path in reversed(self._links)}
        known = [(name, link) for name, link in found.items() if link is not None]
        return dict(sorted(known[:most]))
