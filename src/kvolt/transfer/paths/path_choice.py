"""Choosing: of the paths that two agents can take between them, the one that is planned to be the fastest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvolt.transfer.paths.capabilities import Capabilities
from kvolt.transfer.paths.lanes import Lane, MemoryKind, Place, lanes
from kvolt.transfer.paths.link_speeds import LinkSpeeds
from kvolt.transfer.paths.routes import TYPICAL_PIECE_BYTES, NoRoute, plan

WORTH_CHANGING = 1.25
"""So many times as fast as the path that is taken: speeds that change by the hour shall not move blocks to and fro."""
PROVEN = 8
"""Large transfers until a path's speed is believed more than the table of lanes."""
_EVERYBODY = ("copy", "cuda-copy")
"""What staging takes on either side: who has a device's memory can copy from and to it."""


class Choice(NamedTuple):
    path: str
    challenger: str | None
    """Another path that is worth a read now and then: by the table faster, and not known to be slower today."""


def choose(
    source: Place,
    destination: Place,
    paths: Sequence[str],
    mine: Capabilities,
    theirs: Capabilities,
    speeds: LinkSpeeds,
    *,
    taken: str = "",
) -> Choice:
    """Of `paths`, which both sides can take. `taken`: what was chosen before.

    A measured speed is compared with measured ones only: a busy machine makes every path slow, and the table is that
    of an idle one. So blocks leave a path when another has proven faster, which takes reads over it.
    """
    sides = (source, destination)
    guessed = {path: bytes_per_s(*sides, path, mine, theirs, LinkSpeeds()) for path in paths}
    by_table = max(guessed, key=guessed.__getitem__)
    path = taken if taken in guessed else by_table
    proven = speeds.proven(PROVEN)
    measured = {
        each: speed
        for each in paths
        if (speed := measured_bytes_per_s(*sides, each, mine, theirs, proven)) is not None
    }
    if path in measured:
        best = max(measured, key=measured.__getitem__)
        if measured[best] >= WORTH_CHANGING * measured[path]:
            path = best
    if path != by_table:
        return Choice(path, by_table)
    unproven = {each: guess for each, guess in guessed.items() if each not in measured and each != path}
    rival = max(unproven, key=unproven.__getitem__, default=None)
    if rival is None or path not in measured or unproven[rival] < WORTH_CHANGING * measured[path]:
        return Choice(path, None)
    return Choice(path, rival)


def lane_taken(
    source: Place, destination: Place, path: str, mine: Capabilities, theirs: Capabilities
) -> Lane | None:
    """The lane that a path is between these two; None for one that the table has not."""
    can = mine.paths & theirs.paths
    found = (lane for lane in lanes(source, destination) if lane.path == path)
    return next((lane for lane in found if can.issuperset(lane.needs)), None)


def name_taken(
    source: Place, destination: Place, path: str, mine: Capabilities, theirs: Capabilities
) -> str | None:
    """Under which its speed is kept; None where nobody would ask. What goes through a host for want of a lane from or
    to a device is one name, whatever it goes through."""
    lane = lane_taken(source, destination, path, mine, theirs)
    if lane is not None:
        return lane.name
    return f"{path}/staged" if MemoryKind.DEVICE in (source.kind, destination.kind) else None


def measured_bytes_per_s(
    source: Place, destination: Place, path: str, mine: Capabilities, theirs: Capabilities, speeds: LinkSpeeds
) -> float | None:
    name = name_taken(source, destination, path, mine, theirs)
    measured = None if name is None else speeds.expected(source.host, name)
    return None if measured is None else measured.bytes_per_s


def bytes_per_s(
    source: Place, destination: Place, path: str, mine: Capabilities, theirs: Capabilities, speeds: LinkSpeeds
) -> float:
    """As measured; else by the table of lanes, staged where there is no lane. 0 for a path that leads nowhere."""
    measured = measured_bytes_per_s(source, destination, path, mine, theirs, speeds)
    if measured is not None:
        return measured
    lane = lane_taken(source, destination, path, mine, theirs)
    if lane is not None:
        return 1 / (1 / lane.cost.bytes_per_s + lane.cost.block_s / TYPICAL_PIECE_BYTES)
    only = Capabilities(paths=frozenset((path, *_EVERYBODY)))
    try:
        return plan(source, destination, only, only, LinkSpeeds()).bytes_per_s
    except NoRoute:
        return 0.0
