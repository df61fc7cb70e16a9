"""The route planner: how blocks get from one memory to another, how fast that may be, and what would be faster. Pure.

A route is one hop, or several with memory to stage the blocks in between: pinned or plain memory of either side, of
both sides (device memory of two hosts that have only TCP), or a file that both see. All routes that could exist are
told; the fastest whose every need is met is taken, and the faster ones that were not are kept with what they lack.

Only the owner of a memory writes to it, so the destination reads, and it is the destination that plans: `mine` is what
it can do, `theirs` what the source can. Assumed: hops go one after the other and do not overlap, so their times add up;
each side has memory to stage in.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple

import msgspec

from kvolt.core.errors import Fault, KvoltError
from kvolt.transfer.paths.capabilities import Capabilities
from kvolt.transfer.paths.lanes import Lane, MemoryKind, Place, lanes
from kvolt.transfer.paths.link_speeds import LinkSpeeds

__all__ = ["Capabilities", "Hop", "Lack", "MemoryKind", "NoRoute", "Place", "Route", "RuledOut"]
__all__ += ["plan", "seconds"]

TYPICAL_PIECE_BYTES = 256 << 10
MAX_RULED_OUT = 8
"""The fastest of them are told."""
_MAX_FILE_SYSTEMS = 4
"""So many that both see are considered, in order of their names."""
_STAGING_NEEDS: dict[MemoryKind, tuple[str, ...]] = {
    MemoryKind.HOST: (),
    MemoryKind.SHARED: ("shm",),
    MemoryKind.PINNED: ("cuda-copy",),
}
"""The least precious first: among equally fast ones it is taken."""


class NoRoute(KvoltError):
    """Nothing both sides can do. Fields: source, destination, source_lacks, destination_lacks, remedy; all text."""

    code = "no_route"
    fault = Fault.OPERATOR


class Lack(msgspec.Struct, frozen=True, order=True):
    side: str
    """source or destination"""
    name: str
    reason: str


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    link: str
    """The name under which its speed is measured."""
    source: Place
    destination: Place
    bytes_per_s: float
    block_s: float
    operation_s: float
    is_measured: bool


class RuledOut(msgspec.Struct, frozen=True, kw_only=True):
    """A faster route, had the sides not lacked something."""

    route: str
    bytes_per_s: float
    lacks: tuple[Lack, ...]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    hops: tuple[Hop, ...]
    bytes_per_s: float
    """Expected of the whole, for pieces of the size it was planned for."""
    instead_of: tuple[RuledOut, ...] = ()
    """The fastest first. Not empty: a fall back, which is to be told loudly."""

    def __str__(self) -> str:
        return _words(self.hops)


class _Way(NamedTuple):
    """A route that could be."""

    s_per_byte: float
    hops: tuple[Hop, ...]
    lacks: frozenset[Lack]


class _Sides(NamedTuple):
    source: Place
    destination: Place
    mine: Capabilities
    theirs: Capabilities

    def lacks_of(self, place: Place, names: tuple[str, ...], file: Place | None = None) -> Iterator[Lack]:
        """What whoever owns a place cannot do of these; and whether it does not see a file."""
        is_mine = place.home == self.destination.home
        side, can = ("destination", self.mine) if is_mine else ("source", self.theirs)
        for name in names:
            if name not in can.paths:
                yield Lack(side, name, can.missing.get(name, "not offered"))
        if file is not None and file.file_system not in can.file_systems:
            yield Lack(side, "file", f"does not see the file system {file.file_system}")


def plan(
    source: Place,
    destination: Place,
    mine: Capabilities,
    theirs: Capabilities,
    speeds: LinkSpeeds,
    piece_bytes: int = TYPICAL_PIECE_BYTES,
) -> Route:
    """The fastest route there is for pieces of that size; NoRoute when there is none."""
    sides = _Sides(source, destination, mine, theirs)
    # Equally fast: the one with fewer hops, then the one that is named first.
    ways = sorted(_ways(sides, speeds, piece_bytes), key=lambda way: (way.s_per_byte, len(way.hops)))
    best = next((way for way in ways if not way.lacks), None)
    if best is None:
        raise _no_route(sides, ways)
    return Route(hops=best.hops, bytes_per_s=1 / best.s_per_byte, instead_of=_ruled_out(ways, best))


def seconds(route: Route, num_bytes: int, num_blocks: int) -> float:
    """Expected, for so many blocks (or pieces of blocks) of so many bytes together."""
    return sum(hop.operation_s + num_blocks * hop.block_s + num_bytes / hop.bytes_per_s for hop in route.hops)


def _ways(sides: _Sides, speeds: LinkSpeeds, piece_bytes: int) -> Iterator[_Way]:
    for between in _stagings(sides):
        places = (sides.source, *between, sides.destination)
        staging_lacks = frozenset(
            lack for place in between for lack in sides.lacks_of(place, _STAGING_NEEDS.get(place.kind, ()))
        )
        # For each step all lanes there are, with what they lack; then one of each step.
        choices = [
            [(_hop(lane, *step, speeds), frozenset(_lacks(sides, lane, *step))) for lane in lanes(*step)]
            for step in pairwise(places)
        ]
        for chosen in product(*choices):
            hops = tuple(hop for hop, _ in chosen)
            lacks = staging_lacks.union(*(lacks for _, lacks in chosen))
            yield _Way(sum(1 / hop.bytes_per_s + hop.block_s / piece_bytes for hop in hops), hops, lacks)


def _stagings(sides: _Sides) -> Iterator[tuple[Place, ...]]:
    """The memories that blocks may pass through, in order."""
    yield ()
    theirs, mine = (
        [Place(kind=kind, host=side.host, process=side.process) for kind in _STAGING_NEEDS]
        for side in (sides.source, sides.destination)
    )
    yield from ((place,) for place in mine)
    if sides.source.home == sides.destination.home:
        return
    yield from ((place,) for place in theirs)
    yield from product(theirs, mine)
    both_see = sorted(sides.mine.file_systems & sides.theirs.file_systems)
    for name in both_see[:_MAX_FILE_SYSTEMS]:
        host, process = sides.source.home  # who writes it
        yield (Place(kind=MemoryKind.FILE, host=host, process=process, file_system=name),)


def _hop(lane: Lane, source: Place, destination: Place, speeds: LinkSpeeds) -> Hop:
    # A hop inside one side is that host's own; one between the sides is known by where its bytes come from.
    peer = destination.host if source.kind is MemoryKind.FILE else source.host
    measured = speeds.expected(peer, lane.name)
    # What was measured has the cost of blocks in it.
    bytes_per_s, block_s, operation_s = (
        lane.cost if measured is None else (measured.bytes_per_s, 0.0, measured.latency_s)
    )
    return Hop(
        path=lane.path,
        link=lane.name,
        source=source,
        destination=destination,
        bytes_per_s=bytes_per_s,
        block_s=block_s,
        operation_s=operation_s,
        is_measured=measured is not None,
    )


def _lacks(sides: _Sides, lane: Lane, source: Place, destination: Place) -> Iterator[Lack]:
    names = (lane.path, *lane.needs)
    for end, other in ((source, destination), (destination, source)):
        # Whoever reads or writes a file needs something, and the file does not.
        if end.kind is not MemoryKind.FILE:
            yield from sides.lacks_of(end, names, other if other.kind is MemoryKind.FILE else None)
    yield from sides.lacks_of(destination, lane.reader_needs)


def _ruled_out(ways: list[_Way], best: _Way) -> tuple[RuledOut, ...]:
    """Each for another reason: what lacks more than a faster one tells nothing new."""
    told: list[_Way] = []
    for way in ways:
        if way.s_per_byte < best.s_per_byte and not any(each.lacks <= way.lacks for each in told):
            told.append(way)
    return tuple(
        RuledOut(route=_words(way.hops), bytes_per_s=1 / way.s_per_byte, lacks=tuple(sorted(way.lacks)))
        for way in told[:MAX_RULED_OUT]
    )


def _no_route(sides: _Sides, ways: list[_Way]) -> NoRoute:
    lacks = sorted(frozenset[Lack]().union(*(way.lacks for way in ways)))
    theirs, mine = (
        "; ".join(f"{lack.name} ({lack.reason})" for lack in lacks if lack.side == side) or "nothing"
        for side in ("source", "destination")
    )
    nearest = min(ways, key=lambda way: len(way.lacks))
    remedy = "enable " + " and ".join(f"{lack.name} at the {lack.side}" for lack in sorted(nearest.lacks))
    return NoRoute(
        f"no route from {sides.source.kind} to {sides.destination.kind} memory. The source lacks: {theirs}. "
        f"The destination lacks: {mine}. Remedy: {remedy}",
        source=sides.source.kind.value,
        destination=sides.destination.kind.value,
        source_lacks=theirs,
        destination_lacks=mine,
        remedy=remedy,
    )


def _words(hops: tuple[Hop, ...]) -> str:
    """Text such as device -cuda-copy-> pinned -tcp-> host."""
    return str(hops[0].source.kind) + "".join(f" -{hop.path}-> {hop.destination.kind}" for hop in hops)
