"""Route planner: the fastest route between two memories, and the faster routes that lack a capability. Pure.

A route is one hop, or several with staging memory between them: pinned or pageable memory of either side, of both sides
(device memory of two hosts that have only TCP). All possible routes are enumerated. The fastest one without missing
capabilities is selected; faster ones are reported with what they lack.

Only the owner of a memory writes to it, so the destination reads and plans: `mine` are its capabilities, `theirs` those
of the source. Hops are assumed to run sequentially, so their times add up, and each side to have staging memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple

import msgspec

from kvolt.core.errors import Fault, KvoltError
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.paths.capabilities import PathCapabilities
from kvolt.transfer.paths.lanes import Lane, Place, lanes
from kvolt.transfer.paths.link_speeds import LinkSpeeds

TYPICAL_PIECE_BYTES = 256 << 10
MAX_RULED_OUT = 8
"""Reported routes, fastest first."""
_STAGING_NEEDS: dict[MemoryKind, tuple[str, ...]] = {
    MemoryKind.HOST: (),
    MemoryKind.SHARED: ("shm",),
    MemoryKind.PINNED: ("cuda-copy",),
}
"""Staging memory kinds and their required capabilities, cheapest first; the order breaks ties."""


class NoRoute(KvoltError):
    """No route with the capabilities of both sides. Text fields: source, destination, source_lacks, destination_lacks,
    remedy."""

    code = "no_route"
    fault = Fault.OPERATOR


class Lack(msgspec.Struct, frozen=True, order=True):
    """Capability that one side lacks."""

    side: str
    """`source` or `destination`."""
    name: str
    reason: str


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    link: str
    """Name of its lane, the key of its measured speed."""
    source: Place
    destination: Place
    bytes_per_s: float
    block_s: float


class RuledOut(msgspec.Struct, frozen=True, kw_only=True):
    """Faster route that lacks capabilities."""

    route: str
    bytes_per_s: float
    lacks: tuple[Lack, ...]


class TransferRoute(msgspec.Struct, frozen=True, kw_only=True):
    hops: tuple[Hop, ...]
    bytes_per_s: float
    """Expected for the whole route, for the planned piece size."""
    ruled_out: tuple[RuledOut, ...] = ()
    """Faster routes that lack capabilities, fastest first. If not empty, this route is a fallback."""

    def __str__(self) -> str:
        return _describe(self.hops)


class _Candidate(NamedTuple):
    """Possible route and what it lacks."""

    s_per_byte: float
    hops: tuple[Hop, ...]
    lacks: frozenset[Lack]


class Sides(NamedTuple):
    """Two memories, and what the owner of each can do."""

    source: Place
    destination: Place
    mine: PathCapabilities
    theirs: PathCapabilities

    def lacks_of(self, place: Place, names: tuple[str, ...]) -> Iterator[Lack]:
        """Capabilities of `names` that the owner of `place` lacks."""
        is_mine = place.home == self.destination.home
        side, capabilities = ("destination", self.mine) if is_mine else ("source", self.theirs)
        for name in names:
            if name not in capabilities.paths:
                yield Lack(side, name, capabilities.missing.get(name, "not offered"))


def plan(sides: Sides, speeds: LinkSpeeds, piece_bytes: int = TYPICAL_PIECE_BYTES) -> TransferRoute:
    """Fastest route for pieces of `piece_bytes`. NoRoute if there is none."""
    # Ties: fewer hops, then enumeration order.
    candidates = sorted(
        _candidates(sides, speeds, piece_bytes),
        key=lambda candidate: (candidate.s_per_byte, len(candidate.hops)),
    )
    best = next((candidate for candidate in candidates if not candidate.lacks), None)
    if best is None:
        raise _no_route(sides, candidates)
    return TransferRoute(
        hops=best.hops, bytes_per_s=1 / best.s_per_byte, ruled_out=_ruled_out(candidates, best)
    )


def _candidates(sides: Sides, speeds: LinkSpeeds, piece_bytes: int) -> Iterator[_Candidate]:
    for staging in _stagings(sides):
        places = (sides.source, *staging, sides.destination)
        staging_lacks = frozenset(
            lack for place in staging for lack in sides.lacks_of(place, _STAGING_NEEDS.get(place.kind, ()))
        )
        # All lanes of each hop with what they lack; a candidate combines one lane per hop.
        choices = [
            [(_hop(lane, *step, speeds), frozenset(_lacks(sides, lane, *step))) for lane in lanes(*step)]
            for step in pairwise(places)
        ]
        for chosen in product(*choices):
            hops = tuple(hop for hop, _ in chosen)
            lacks = staging_lacks.union(*(lacks for _, lacks in chosen))
            yield _Candidate(
                sum(1 / hop.bytes_per_s + hop.block_s / piece_bytes for hop in hops), hops, lacks
            )


def _stagings(sides: Sides) -> Iterator[tuple[Place, ...]]:
    """Sequences of staging places that blocks may pass through."""
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


def _hop(lane: Lane, source: Place, destination: Place, speeds: LinkSpeeds) -> Hop:
    measured = speeds.expected(source.host, lane.name)  # kept by the host that the bytes come from
    # A measured speed includes the overhead per block.
    bytes_per_s, block_s = lane.cost[:2] if measured is None else (measured.bytes_per_s, 0.0)
    return Hop(
        path=lane.path,
        link=lane.name,
        source=source,
        destination=destination,
        bytes_per_s=bytes_per_s,
        block_s=block_s,
    )


def _lacks(sides: Sides, lane: Lane, source: Place, destination: Place) -> Iterator[Lack]:
    names = (lane.path, *lane.needs)
    for end in (source, destination):
        yield from sides.lacks_of(end, names)
    yield from sides.lacks_of(destination, lane.reader_needs)


def _ruled_out(candidates: list[_Candidate], best: _Candidate) -> tuple[RuledOut, ...]:
    """Faster candidates that lack something. Skip those that lack a superset of what a faster one lacks."""
    kept: list[_Candidate] = []
    for candidate in candidates:
        if candidate.s_per_byte < best.s_per_byte and not any(each.lacks <= candidate.lacks for each in kept):
            kept.append(candidate)
    return tuple(
        RuledOut(
            route=_describe(candidate.hops),
            bytes_per_s=1 / candidate.s_per_byte,
            lacks=tuple(sorted(candidate.lacks)),
        )
        for candidate in kept[:MAX_RULED_OUT]
    )


def _no_route(sides: Sides, candidates: list[_Candidate]) -> NoRoute:
    lacks = sorted(frozenset[Lack]().union(*(candidate.lacks for candidate in candidates)))
    theirs, mine = (
        "; ".join(f"{lack.name} ({lack.reason})" for lack in lacks if lack.side == side) or "nothing"
        for side in ("source", "destination")
    )
    nearest = min(candidates, key=lambda candidate: len(candidate.lacks))
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


def _describe(hops: tuple[Hop, ...]) -> str:
    """Text such as `device -cuda-copy-> pinned -tcp-> host`."""
    return str(hops[0].source.kind) + "".join(f" -{hop.path}-> {hop.destination.kind}" for hop in hops)
