"""LinkSpeeds: speed and latency of each lane to each host, measured from completed transfers. Pure.

A link is a peer host and a lane (`Hop.link`). Large transfers measure its speed, small ones its cost per operation;
transfers in between are ignored. Speed is the quotient of exponentially decayed sums of bytes and seconds, so large
transfers have more weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvolt.core.card import MeasuredLink

MAX_LINKS = 512
"""The least recently used link is evicted."""
LARGE_BYTES = 4 << 20
"""Minimum size of a transfer that measures the speed."""
SMALL_BYTES = 64 << 10
"""Maximum size of a transfer that measures the cost per operation."""

_DECAY = 0.9
"""Factor on the weight of earlier transfers per transfer: about the last ten count."""


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
        """By (peer, lane), least recently used first."""

    def __len__(self) -> int:
        return len(self._links)

    def observe(self, peer: str, path: str, num_bytes: int, seconds: float) -> None:
        """Record a completed transfer. Ignored if of medium size or without a positive finite time."""
        is_large, is_small = num_bytes >= LARGE_BYTES, 0 < num_bytes <= SMALL_BYTES
        if not (is_large or is_small) or not 0 < seconds < float("inf"):
            return
        measured = self._links.pop((peer, path), None) or _Measured()
        self._links[peer, path] = measured
        if len(self._links) > self._max_links:
            del self._links[next(iter(self._links))]
        if is_small:
            before = measured.latency_s
            measured.latency_s = seconds if before is None else _DECAY * before + (1 - _DECAY) * seconds
            return
        # The first one includes the handshake and first-touch pages: the second replaces it.
        decay = _DECAY if measured.num_large != 1 else 0.0
        # An overestimated latency must not make a link look arbitrarily fast.
        transfer_s = max(seconds - (measured.latency_s or 0.0), seconds / 2)
        measured.num_large += 1
        measured.num_bytes = decay * measured.num_bytes + num_bytes
        measured.seconds = decay * measured.seconds + transfer_s

    def expected(self, peer: str, path: str) -> MeasuredLink | None:
        """Measured speed; None before the first large transfer."""
        measured = self._links.get((peer, path))
        if measured is None or not measured.num_large:
            return None
        return MeasuredLink(path, measured.num_bytes / measured.seconds, measured.latency_s or 0.0)

    def num_large(self, peer: str, path: str) -> int:
        """Number of transfers that measured the speed."""
        measured = self._links.get((peer, path))
        return 0 if measured is None else measured.num_large

    def proven(self, min_transfers: int) -> LinkSpeeds:
        """Copy with only the links that have at least `min_transfers` large transfers."""
        proven = LinkSpeeds(self._max_links)
        proven._links = {name: each for name, each in self._links.items() if each.num_large >= min_transfers}
        return proven

    def forget(self, peer: str) -> None:
        """Remove all links of a host."""
        for name in [name for name in self._links if name[0] == peer]:
            del self._links[name]

    def links(self, max_links: int | None = None) -> dict[str, MeasuredLink]:
        """Measured speeds by "path@peer", sorted by name, as in `EngineInfo.links`.

        `max_links`: only the most recently used ones.
        """
        expected = {f"{path}@{peer}": self.expected(peer, path) for peer, path in reversed(self._links)}
        known = [(name, link) for name, link in expected.items() if link is not None]
        return dict(sorted(known[:max_links]))
