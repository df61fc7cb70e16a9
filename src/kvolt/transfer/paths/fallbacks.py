"""Fallback detection: whether a path is much slower than an alternative, and why the alternative was not used. Pure.

Either a faster route lacks a capability on one side, or both sides support it but it was not usable (private memory, an
unreachable socket, a setting).
"""

from __future__ import annotations

import msgspec

from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.paths.lanes import Place
from kvolt.transfer.paths.link_speeds import LinkSpeeds
from kvolt.transfer.paths.path_choice import bytes_per_s, lane_name
from kvolt.transfer.paths.routes import Lack, NoRoute, Sides, TransferRoute, plan

MIN_SPEEDUP = 1.5
"""Minimum speed ratio of the alternative to report a fallback."""
_MAX_REASON_CHARS = 300
"""Limit for the untrusted text of a peer."""


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """Path in use and a faster alternative."""

    path: str
    bytes_per_s: float
    alternative: str
    """Faster route as text."""
    alternative_bytes_per_s: float
    lacks: tuple[Lack, ...]
    is_choice: bool = False
    """Both sides support the faster route."""

    @property
    def names(self) -> tuple[str, ...]:
        """Distinct names of the missing capabilities."""
        return tuple(dict.fromkeys(lack.name for lack in self.lacks))

    def __str__(self) -> str:
        reasons = "; ".join(
            f"{lack.name} at the {lack.side}: {_sanitize(lack.reason)}" for lack in self.lacks
        )
        return (
            f"path={self.path} gb_per_s={self.bytes_per_s / 1e9:.2g} alternative='{self.alternative}' "
            f"alternative_gb_per_s={self.alternative_bytes_per_s / 1e9:.2g} missing='{reasons}'"
        )


def table_route(sides: Sides) -> TransferRoute | None:
    """Fastest route by the lane table; None if the capabilities allow none."""
    try:
        return plan(sides, LinkSpeeds())
    except NoRoute:
        return None


def find_fallback(
    sides: Sides, path: str, speeds: LinkSpeeds, route: TransferRoute | None
) -> Fallback | None:
    """Compare the path in use with `route`, its `table_route`. None unless the route is much faster.

    The path must also be slower by the lane table, since a measured speed alone is not comparable with the table.
    """
    name = lane_name(sides, path)
    if name is None or route is None:
        return None
    table_speed = bytes_per_s(sides, path, LinkSpeeds())
    measured = speeds.expected(sides.source.host, name)
    current = table_speed if measured is None else measured.bytes_per_s
    faster = next(iter(route.ruled_out), None)
    is_choice = False
    if faster is not None and faster.bytes_per_s > MIN_SPEEDUP * current:
        route_text, possible, lacks = faster.route, faster.bytes_per_s, faster.lacks
    else:
        route_text, possible, lacks = (
            str(route),
            _speed(route, speeds),
            (_not_taken_reason(sides.source, route),),
        )
        is_choice = route.hops[0].path == "shm" and sides.source.kind is not MemoryKind.HOST
        if _crossing(route) == path or route.bytes_per_s <= MIN_SPEEDUP * table_speed:
            return None
        if possible <= MIN_SPEEDUP * current:
            return None
    return Fallback(
        path=path,
        bytes_per_s=current,
        alternative=route_text,
        alternative_bytes_per_s=possible,
        lacks=lacks,
        is_choice=is_choice,
    )


def _crossing(route: TransferRoute) -> str:
    """Path of the hop that leaves the source process."""
    return next((hop.path for hop in route.hops if hop.source.home != hop.destination.home), "")


def _speed(route: TransferRoute, speeds: LinkSpeeds) -> float:
    """Speed of the route: measured if all hops were, else by the lane table."""
    links = [speeds.expected(hop.source.host, hop.link) for hop in route.hops]
    measured = [link.bytes_per_s for link in links if link is not None]
    return route.bytes_per_s if len(measured) < len(links) else 1 / sum(1 / each for each in measured)


def _not_taken_reason(source: Place, route: TransferRoute) -> Lack:
    """Reason why a route that both sides support is not used."""
    if source.kind is MemoryKind.HOST:
        return Lack(
            "source", "shared memory", "the blocks are in private memory; allocate them with Slab.shared"
        )
    if route.hops[0].path == "shm":
        reason = "its Unix socket is unreachable; run both processes in one network namespace, as one user"
        return Lack("source", "socket", reason)
    if route.hops[0].path == "cuda-ipc":
        return Lack("source", "cuda-ipc", "its memory cannot be opened by the reader; see the log")
    return Lack("destination", route.hops[0].path, "NIXL does not work between the two; see the log")


def _sanitize(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + "..."
