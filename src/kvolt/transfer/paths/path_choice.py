"""Path choice between two agents, by measured speeds and the lane table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.paths.capabilities import PathCapabilities
from kvolt.transfer.paths.lanes import Lane, lanes
from kvolt.transfer.paths.link_speeds import LinkSpeeds
from kvolt.transfer.paths.routes import TYPICAL_PIECE_BYTES, NoRoute, Sides, plan

MIN_SWITCH_SPEEDUP = 1.25
"""Minimum speed ratio to switch paths, so that changing speeds do not cause oscillation."""
MIN_PROVEN_READS = 8
"""Large transfers after which a measured speed takes precedence over the lane table."""
_COMMON_PATHS = ("copy", "cuda-copy")
"""Paths that staging may use on either side."""


class PathChoice(NamedTuple):
    path: str
    challenger: str | None
    """Path to try occasionally: faster by the table and not measured as slower."""


def choose(sides: Sides, paths: Sequence[str], speeds: LinkSpeeds, *, current: str = "") -> PathChoice:
    """Choose one of `paths`, which both sides support. `current`: the previous choice.

    Measured speeds are compared only with each other, since a busy machine makes every path slower than the table of
    an idle one. A path is left when another was measured as faster, which takes reads over it.
    """
    table_speeds = {path: bytes_per_s(sides, path, LinkSpeeds()) for path in paths}
    table_best = max(table_speeds, key=table_speeds.__getitem__)
    path = current if current in table_speeds else table_best
    proven = speeds.proven(MIN_PROVEN_READS)
    measured = {each: speed for each in paths if (speed := measured_speed(sides, each, proven)) is not None}
    if path in measured:
        best = max(measured, key=measured.__getitem__)
        if measured[best] >= MIN_SWITCH_SPEEDUP * measured[path]:
            path = best
    if path != table_best:
        return PathChoice(path, table_best)
    unproven = {each: speed for each, speed in table_speeds.items() if each not in measured and each != path}
    challenger = max(unproven, key=unproven.__getitem__, default=None)
    if (
        challenger is None
        or path not in measured
        or unproven[challenger] < MIN_SWITCH_SPEEDUP * measured[path]
    ):
        return PathChoice(path, None)
    return PathChoice(path, challenger)


def lane_of_path(sides: Sides, path: str) -> Lane | None:
    """Lane of `path` between two places; None if the table has none."""
    common = sides.mine.paths & sides.theirs.paths
    candidates = (lane for lane in lanes(sides.source, sides.destination) if lane.path == path)
    return next((lane for lane in candidates if common.issuperset(lane.needs)), None)


def lane_name(sides: Sides, path: str) -> str | None:
    """Key of the measured speed of a path; None if it is never planned. A path from or to a device without a lane is
    staged in host memory and has one key, whatever the staging."""
    lane = lane_of_path(sides, path)
    if lane is not None:
        return lane.name
    is_staged = MemoryKind.DEVICE in (sides.source.kind, sides.destination.kind)
    return f"{path}/staged" if is_staged else None


def measured_speed(sides: Sides, path: str, speeds: LinkSpeeds) -> float | None:
    name = lane_name(sides, path)
    measured = None if name is None else speeds.expected(sides.source.host, name)
    return None if measured is None else measured.bytes_per_s


def bytes_per_s(sides: Sides, path: str, speeds: LinkSpeeds) -> float:
    """Measured speed, else by the lane table, staged if there is no lane. 0 for an impossible path."""
    measured = measured_speed(sides, path, speeds)
    if measured is not None:
        return measured
    lane = lane_of_path(sides, path)
    if lane is not None:
        return 1 / (1 / lane.cost.bytes_per_s + lane.cost.block_s / TYPICAL_PIECE_BYTES)
    only = PathCapabilities(paths=frozenset((path, *_COMMON_PATHS)))
    try:
        return plan(sides._replace(mine=only, theirs=only), LinkSpeeds()).bytes_per_s
    except NoRoute:
        return 0.0
