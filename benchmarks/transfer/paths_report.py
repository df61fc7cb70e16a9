"""Figures of the paths as people read them: rates, ratios within a round, goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec
from benchmarks.harness import Spread, goal, ratios, spread, table

NIXL_VERSION = "1.5.1"
NIXL = f"NIXL {NIXL_VERSION}"
MEMCPY, SOCKET = "memcpy", "plain socket"
SHM, SHM_CHECKED = "kvolt shm", "kvolt shm, checksums"
TCP, TCP_CHECKED = "kvolt tcp", "kvolt tcp, checksums"
NIXL_READ, NIXL_WRITE = f"{NIXL} read", f"{NIXL} write"
NIXL_PRIVATE_READ, NIXL_PRIVATE_WRITE = f"{NIXL_READ}, private", f"{NIXL_WRITE}, private"
NIXL_TCP_READ, NIXL_TCP_WRITE = f"{NIXL} tcp read", f"{NIXL} tcp write"

GOAL_OF_LIMIT = 0.8
GOAL_CPU_US = 1.0
GOAL_PEER_BYTES = 64 << 10
"""Of the blocks at which kvolt must be ahead of the peer."""


class Family(msgspec.Struct, frozen=True):
    """What moves bytes by the same means, and is compared."""

    limit: str
    ours: tuple[str, ...]
    """The first has the goals."""
    peers: tuple[str, ...]


FAMILIES = (
    Family(
        MEMCPY,
        (SHM, SHM_CHECKED),
        (NIXL_READ, NIXL_WRITE, NIXL_PRIVATE_READ, NIXL_PRIVATE_WRITE),
    ),
    Family(SOCKET, (TCP, TCP_CHECKED), (NIXL_TCP_READ, NIXL_TCP_WRITE)),
)


class Row(msgspec.Struct, frozen=True):
    """One system with blocks of one size in one round."""

    round: int
    system: str
    block_bytes: int
    num_bytes: int
    took_s: tuple[float, ...]
    """Of each transfer."""

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / statistics.median(self.took_s) / 1e9


class CpuRow(msgspec.Struct, frozen=True):
    """CPU time of both processes, per block, of offers and reads of many small blocks."""

    round: int
    system: str
    num_blocks: int
    source_us: float
    target_us: float

    @property
    def both_us(self) -> float:
        return self.source_us + self.target_us


def text(rows: Sequence[Row], cpu_rows: Sequence[CpuRow], missing: Mapping[str, str]) -> str:
    parts = [_rates(rows), _cpu(cpu_rows), _goals(rows, cpu_rows)]
    parts.extend(f"missing: {system}: {error}" for system, error in missing.items())
    return "\n\n".join(parts)


def _rates(rows: Sequence[Row]) -> str:
    body = []
    for block_bytes in sorted({row.block_bytes for row in rows}):
        for family in FAMILIES:
            for system in (family.limit, *family.ours, *family.peers):
                rates = _by_round(rows, system, block_bytes)
                if rates:
                    body.append(
                        (
                            f"{block_bytes >> 10} KiB",
                            system,
                            spread(list(rates.values())).text(),
                            _text(of_limit(rows, family, system, block_bytes)),
                            _text(over_peer(rows, family, system, block_bytes)),
                        )
                    )
    return table(("blocks", "system", "GB/s", "of its limit", f"x {NIXL}"), body)


def _cpu(rows: Sequence[CpuRow]) -> str:
    body = []
    for system in dict.fromkeys(row.system for row in rows):
        mine = [row for row in rows if row.system == system]
        body.append(
            (
                f"{mine[0].num_blocks:,}",
                system,
                spread([row.both_us for row in mine]).text(),
                f"{statistics.median(row.source_us for row in mine):.2f}",
                f"{statistics.median(row.target_us for row in mine):.2f}",
            )
        )
    return table("blocks | system | CPU us/block | source | target", body)


def _goals(rows: Sequence[Row], cpu_rows: Sequence[CpuRow]) -> str:
    told = []
    sizes = sorted({row.block_bytes for row in rows})
    for family in FAMILIES:
        ours = family.ours[0]
        for block_bytes in sizes:
            found = of_limit(rows, family, ours, block_bytes)
            if found is not None:
                name = f"{ours}, {block_bytes >> 10} KiB: {GOAL_OF_LIMIT:.0%} of {family.limit}"
                told.append(goal(name, found.median >= GOAL_OF_LIMIT, found.text()))
        found = over_peer(rows, family, ours, GOAL_PEER_BYTES)
        if found is not None:
            name = f"{ours}, {GOAL_PEER_BYTES >> 10} KiB: ahead of {NIXL}, its fastest way"
            told.append(goal(name, found.median > 1, f"{found.text()} x"))
    for system in dict.fromkeys(row.system for row in cpu_rows):
        both = spread([row.both_us for row in cpu_rows if row.system == system])
        name = f"{system}: under {GOAL_CPU_US:g} us of CPU per block, both sides"
        told.append(goal(name, both.median < GOAL_CPU_US, both.text()))
    return "\n".join(told)


def of_limit(rows: Sequence[Row], family: Family, system: str, block_bytes: int) -> Spread | None:
    """None for the limit itself."""
    mine, limit = (_by_round(rows, name, block_bytes) for name in (system, family.limit))
    return None if system == family.limit else _ratio(mine, limit)


def over_peer(rows: Sequence[Row], family: Family, system: str, block_bytes: int) -> Spread | None:
    """Over the faster one of the peer's ways in each round; None for what is not ours."""
    best: dict[int, float] = {}
    for peer in family.peers:
        for number, rate in _by_round(rows, peer, block_bytes).items():
            best[number] = max(best.get(number, 0.0), rate)
    return _ratio(_by_round(rows, system, block_bytes), best) if system in family.ours else None


def _by_round(rows: Sequence[Row], system: str, block_bytes: int) -> dict[int, float]:
    return {row.round: row.gb_per_s for row in rows if (row.system, row.block_bytes) == (system, block_bytes)}


def _ratio(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Spread | None:
    found = ratios(mine, theirs)
    return spread(found) if found else None


def _text(found: Spread | None) -> str:
    return "-" if found is None else found.text()
