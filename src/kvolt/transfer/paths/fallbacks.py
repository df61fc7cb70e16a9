"""Fallbacks: whether the path that blocks took is a slow one, what it is taken in the place of, and why. Pure.

Two reasons there are: a faster route lacks something at one of the sides, or both have what it takes and the agent goes
another way all the same (memory that nobody else can map, a socket that cannot be reached, an option).
"""

from __future__ import annotations

import msgspec

from kvolt.transfer.paths.capabilities import Capabilities
from kvolt.transfer.paths.lanes import MemoryKind, Place
from kvolt.transfer.paths.link_speeds import LinkSpeeds
from kvolt.transfer.paths.path_choice import bytes_per_s, name_taken
from kvolt.transfer.paths.routes import Lack, NoRoute, Route, plan

WORTH_TELLING = 1.5
"""So many times as fast, or it is no fall back."""
_MAX_REASON_CHARS = 300
"""A peer's reasons are its own words."""


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """A path was taken that is slower than another would be."""

    path: str
    bytes_per_s: float
    instead_of: str
    """The route, in words."""
    could_be_bytes_per_s: float
    lacks: tuple[Lack, ...]
    is_choice: bool = False
    """Both sides have what the faster route takes."""

    @property
    def names(self) -> tuple[str, ...]:
        """What is lacking, each once."""
        return tuple(dict.fromkeys(lack.name for lack in self.lacks))

    def __str__(self) -> str:
        reasons = "; ".join(f"{lack.name} at the {lack.side}: {_tame(lack.reason)}" for lack in self.lacks)
        return (
            f"{self.path} at {self.bytes_per_s / 1e9:.2g} GB/s in the place of {self.instead_of} at about "
            f"{self.could_be_bytes_per_s / 1e9:.2g} GB/s, which lacks {reasons}"
        )


def table_route(source: Place, destination: Place, mine: Capabilities, theirs: Capabilities) -> Route | None:
    """The fastest route by the table of lanes; None where the capabilities of both sides allow none."""
    try:
        return plan(source, destination, mine, theirs, LinkSpeeds())
    except NoRoute:
        return None


def find_fallback(
    source: Place,
    destination: Place,
    path: str,
    mine: Capabilities,
    theirs: Capabilities,
    speeds: LinkSpeeds,
    route: Route | None,
) -> Fallback | None:
    """Compare the `path` that blocks took with `route`, their `table_route`. None unless the route is much faster.

    A measured speed is not compared with the table alone: the path must be slower by the table, too.
    """
    name = name_taken(source, destination, path, mine, theirs)
    if name is None or route is None:
        return None
    guessed = bytes_per_s(source, destination, path, mine, theirs, LinkSpeeds())
    measured = speeds.expected(source.host, name)
    took = guessed if measured is None else measured.bytes_per_s
    ruled_out = next(iter(route.instead_of), None)
    is_choice = False
    if ruled_out is not None and ruled_out.bytes_per_s > WORTH_TELLING * took:
        words, could_be, lacks = ruled_out.route, ruled_out.bytes_per_s, ruled_out.lacks
    else:
        words, could_be, lacks = str(route), _speed(route, speeds), (_not_taken(source, route),)
        is_choice = route.hops[0].path == "shm" and source.kind is not MemoryKind.HOST
        if _crossing(route) == path or route.bytes_per_s <= WORTH_TELLING * guessed:
            return None
        if could_be <= WORTH_TELLING * took:
            return None
    return Fallback(
        path=path,
        bytes_per_s=took,
        instead_of=words,
        could_be_bytes_per_s=could_be,
        lacks=lacks,
        is_choice=is_choice,
    )


def _crossing(route: Route) -> str:
    """The path of the hop that leaves the source's process."""
    return next((hop.path for hop in route.hops if hop.source.home != hop.destination.home), "")


def _speed(route: Route, speeds: LinkSpeeds) -> float:
    """As measured, where all of it was."""
    found = [speeds.expected(hop.source.host, hop.link) for hop in route.hops]
    measured = [link.bytes_per_s for link in found if link is not None]
    return route.bytes_per_s if len(measured) < len(found) else 1 / sum(1 / each for each in measured)


def _not_taken(source: Place, route: Route) -> Lack:
    """Why agents that both have what it takes do not go this way."""
    if source.kind is MemoryKind.HOST:
        return Lack("source", "shared memory", "its blocks lie in private memory; make them with Slab.shared")
    if route.hops[0].path == "shm":
        told = "its socket cannot be reached from here; run both in one network namespace, as one user"
        return Lack("source", "socket", told)
    if route.hops[0].path == "cuda-ipc":
        return Lack("source", "cuda-ipc", "its memory cannot be opened from here; the log says why")
    return Lack("destination", route.hops[0].path, "NIXL does not work between the two; the log says why")


def _tame(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + "..."
