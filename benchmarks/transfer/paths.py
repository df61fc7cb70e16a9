"""Blocks from one process to another: kvolt over shared memory and over TCP, beside its limits and NIXL.

    python -m benchmarks.transfer.paths              about three minutes; kept in results/paths.{json,txt}

Run from the repository's root, on a machine that does nothing else; two cores are enough. 64 MiB in blocks of 64 KiB,
256 KiB and 1 MiB. All systems read the same memory and write the same memory (`memories`: two memfds, touched before),
the blocks in one random order. Every source has one core and every target another; processes are started once and
sleep while others are measured. In every round all systems take their turn with every size, and the next round goes
the other way round. A figure is the median of a system's transfers in a round, after one that is not counted; ratios
are taken within a round. After each turn the target is compared with the source, and cleared before it.

Limits: `memcpy` is one of all 64 MiB from the source's memory, mapped, to the target's. `plain socket` is a blocking
sendall of the source's memory and recv_into of the target's, over loopback.
TLS: kvolt's TCP with a cluster key; its limit is plain TCP, with checksums or without.
kvolt: from the call with a ticket at hand to the end of the read, without checksums and with: then both sides work them
out.
NIXL over UCX: from the numbers of the blocks to DONE, blocks described before, no checksums, no notification, no
progress thread; both sides spin. Reads by the target and writes by the source; kvolt is held against the faster.
By default UCX lets the kernel copy from process to process (cma), which looks up every page: so it has rows with memory
of its own, too (`private`), which has huge pages where the system gives them. `tcp`: with UCX_TLS=tcp. If it does not
start its rows are missing, with the reason.
CPU: of both processes with all their threads, for an offer and a read of 1,000 blocks of 64 bytes, per block. Nothing
is taken off.

The peer is installed at the first run (--peer-dir, KVOLT_PEER; 0.4 GB, no torch).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from benchmarks.harness import (
    BrokenRun,
    Figure,
    Missing,
    Rows,
    goal,
    in_turn,
    parser_for,
    report,
    run,
    say,
    table,
)
from benchmarks.processes import Child, clean_environ, installed_python
from benchmarks.transfer.memories import Memories, arrived
from benchmarks.transfer.over_kvolt import CLUSTER_KEY, FEW_BLOCKS, FEW_BYTES
from benchmarks.transfer.side import POLL

from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.transfer.memory import block_bytes as native

NIXL_VERSION = "1.5.1"
NIXL = f"NIXL {NIXL_VERSION}"
MEMCPY, SOCKET = "memcpy", "plain socket"
SHM, TCP, TLS = "kvolt shm", "kvolt tcp", "kvolt tls"
OURS = {
    SHM: ("shm", False),
    f"{SHM}, checksums": ("shm", True),
    TCP: ("tcp", False),
    f"{TCP}, checksums": ("tcp", True),
}
"""Path, and whether checksums are verified."""
OVER_TLS = {TLS: ("tls", False), f"{TLS}, checksums": ("tls", True)}
"""The same; each is compared with the same over plain TCP."""

GOAL_OF_LIMIT = 0.8
GOAL_CPU_US = 1.0
GOAL_PEER_BYTES = 64 << 10
"""Block size at which kvolt must be faster than the peer."""

Transfers = Callable[[int, int], Sequence[float]]
"""Seconds of each transfer, given bytes of a block and a count."""


class Plan(msgspec.Struct, frozen=True):
    rounds: int
    num_bytes: int
    block_sizes: tuple[int, ...]
    transfers: int
    """Transfers of a system in a round; one more is not counted."""
    small_reads: int
    """Small reads whose CPU time is summed."""


_SIZES = (64 << 10, 256 << 10, 1 << 20)
_FULL = Plan(rounds=15, num_bytes=64 << 20, block_sizes=_SIZES, transfers=5, small_reads=200)
_SMOKE = Plan(rounds=1, num_bytes=4 << 20, block_sizes=_SIZES[:2], transfers=1, small_reads=2)


class Row(msgspec.Struct, frozen=True):
    """One system with blocks of one size in one round."""

    round: int
    system: str
    block_bytes: int
    num_bytes: int
    took_s: tuple[float, ...]
    """Duration of each transfer."""


class CpuRow(msgspec.Struct, frozen=True):
    """CPU time of both processes, per block, of offers and reads of many small blocks."""

    round: int
    system: str
    num_blocks: int
    source_us: float
    target_us: float


def main() -> None:
    options = parser_for(__file__, __doc__, peer=NIXL).parse_args()
    if not native.IS_NATIVE:
        raise Missing("kvolt's native bytes: install a C compiler, then `pip install -e .`")
    plan = _SMOKE if options.smoke else _FULL
    rows: list[Row] = []
    cpu_rows: list[CpuRow] = []
    with ExitStack() as stack:
        memories = Memories.new(plan.num_bytes)
        stack.callback(memories.close)
        environ = {CLUSTER_KEY: stack.enter_context(_cluster_key())}
        kvolt = stack.enter_context(open_pair(sys.executable, "over_kvolt", memories, **environ))
        transfers = _of_kvolt(kvolt)
        nixl, missing = _of_nixl(stack, memories, options.peer_dir, not options.smoke)
        transfers |= nixl
        for number in range(plan.rounds):
            rows += _round(plan, number, transfers, missing, memories)
            cpu_rows += _cpu_round(plan, number, kvolt)
    about = (
        f"{plan.rounds} rounds of {plan.transfers} transfers of {plan.num_bytes >> 20} MiB in scattered blocks; "
        f"CPU over {plan.small_reads} reads of {FEW_BLOCKS:,} blocks of {FEW_BYTES} bytes a round."
    )
    results = {"peer": NIXL, "plan": plan, "missing": missing, "rows": rows, "cpu_rows": cpu_rows}
    report(options, f"{about}\n\n{text(rows, cpu_rows, missing)}", results)


def _round(
    plan: Plan, number: int, transfers: dict[str, Transfers], missing: dict[str, str], memories: Memories
) -> list[Row]:
    """A peer that breaks is dropped, with its reason."""
    rows = []
    source, target = memories.map_source_to_read(), memories.map_target()
    for size in plan.block_sizes:
        for name in in_turn(list(transfers), number):
            target[:] = 0
            try:
                took_s = transfers[name](size, 1 + plan.transfers)[1:]
            except BrokenRun as error:
                if name not in _NIXL:
                    raise
                missing[name] = str(error)
                del transfers[name]
                continue
            if not arrived(source, target, plan.num_bytes if name in (MEMCPY, SOCKET) else size):
                raise BrokenRun(f"{name} left other bytes at the target than were at the source")
            rows.append(Row(number, name, size, plan.num_bytes, tuple(took_s)))
            say(f"round {number + 1}  {size >> 10:5} KiB  {name:24} {RATE.value(rows[-1]):.2f} GB/s")
    return rows


@contextmanager
def _cluster_key() -> Iterator[str]:
    """A file with a new key."""
    with tempfile.NamedTemporaryFile() as file:  # which only its owner can read
        file.write(ClusterAuthority.create(time.time()).to_pem())
        file.flush()
        yield file.name


# --- two processes that move blocks from one to the other


class Side(Child):
    """One of them; it starts at once, and is ready when its first answer has been received."""

    def __init__(
        self, python: str, module: str, side: str, memories: Memories, core: int | None, env: dict[str, str]
    ) -> None:
        numbers = [*memories.descriptors, memories.num_bytes]
        job = {"module": module, "side": side, "core": core, "memories": numbers}
        command = [python, "-m", "benchmarks.transfer.side", json.dumps(job)]
        super().__init__(f"{module} {side}", command, env, memories.descriptors)

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        self.send({"do": do, **more})
        return self.receive()


class Pair(NamedTuple):
    """Both, connected to each other."""

    source: Side
    target: Side


@contextmanager
def open_pair(
    python: str, module: str, memories: Memories, prefix: str = "", **environ: str
) -> Iterator[Pair]:
    """Processes with the module's classes Source and Target, or those with this prefix."""
    kept = {name: value for name, value in clean_environ().items() if not name.startswith(("UCX_", "NIXL_"))}
    # A core for each: both on one core now and then would dominate the result.
    cores = sorted(os.sched_getaffinity(0))
    children: list[Side] = []
    try:
        for side, core in zip(
            ("Source", "Target"), cores[:2] if len(cores) > 1 else (None, None), strict=True
        ):
            children.append(Side(python, module, f"{prefix}{side}", memories, core, {**kept, **environ}))
        source, target = children
        of_source, of_target = source.receive(), target.receive()
        target.ask("meet", **of_source)
        if of_target:
            source.ask("meet", **of_target)
        yield Pair(source, target)
    finally:
        for child in reversed(children):
            child.stop()


def _read(pair: Pair, path: str, is_checked: bool, size: int, count: int) -> Sequence[float]:
    tickets = pair.source.ask("offer", path=path, block_bytes=size, count=count)["tickets"]
    arguments = {"path": path, "block_bytes": size, "tickets": tickets, "is_checked": is_checked}
    took_s: Sequence[float] = pair.target.ask("read", **arguments)["took_s"]
    pair.source.ask("settle")
    return took_s


def _of_kvolt(pair: Pair) -> dict[str, Transfers]:
    def limit(do: str, size: int, count: int) -> Sequence[float]:
        took_s: Sequence[float] = pair.target.ask(do, count=count)["took_s"]
        return took_s

    limits: dict[str, Transfers] = {MEMCPY: partial(limit, "memcpy"), SOCKET: partial(limit, "socket")}
    return limits | {name: partial(_read, pair, *way) for name, way in (OURS | OVER_TLS).items()}


def _cpu_round(plan: Plan, number: int, pair: Pair) -> list[CpuRow]:
    rows = []
    for name, way in OURS.items():
        before = [side.ask("mark")["cpu_s"] for side in pair]
        _read(pair, *way, FEW_BYTES, plan.small_reads)
        num_blocks = plan.small_reads * FEW_BLOCKS
        used_us = [
            (side.ask("mark")["cpu_s"] - start) / num_blocks * 1e6
            for side, start in zip(pair, before, strict=True)
        ]
        rows.append(CpuRow(number, name, FEW_BLOCKS, *used_us))
        say(f"round {number + 1}  {name:24} {sum(used_us):.2f} us of CPU per small block")
    return rows


# --- the peer


class NixlWay(NamedTuple):
    prefix: str = ""
    """Prefix of the class names of both sides."""
    transport: str = ""
    operation: str = "READ"

    def transfers(self, pair: Pair, size: int, count: int) -> Sequence[float]:
        mover, other = pair[::-1] if self.operation == "READ" else pair
        if self.prefix:
            pair.target.ask("clear")
        other.send({"do": POLL})
        try:
            arguments = {"operation": self.operation, "block_bytes": size, "count": count}
            took_s: Sequence[float] = mover.ask("move", **arguments)["took_s"]
        finally:
            with suppress(BrokenRun):  # the first error is the one to report
                other.ask("hello")  # which ends its polling
        if self.prefix:
            pair.target.ask("show")
        return took_s


_KERNEL = {
    f"{NIXL} {name}{suffix}": NixlWay(prefix, "", name.upper())
    for prefix, suffix in (("", ""), ("Private", ", private"))
    for name in ("read", "write")
}
_TCP = {f"{NIXL} tcp {name}": NixlWay("", "tcp", name.upper()) for name in ("read", "write")}
_NIXL = {**_KERNEL, **_TCP}


def _of_nixl(
    stack: ExitStack, memories: Memories, peer_dir: Path, may_install: bool
) -> tuple[dict[str, Transfers], dict[str, str]]:
    """Its ways, and why some are missing."""
    # It names torch as a dependency, and works without.
    packages = (["numpy"], ["--no-deps", f"nixl-cu12=={NIXL_VERSION}"])
    try:
        python = installed_python(
            peer_dir / "nixl", "import nixl_cu12._api", f"{NIXL} (0.4 GB)", packages, may_install=may_install
        )
    except BrokenRun as error:
        return {}, dict.fromkeys(_NIXL, str(error))
    transfers: dict[str, Transfers] = {}
    missing: dict[str, str] = {}
    pairs: dict[tuple[str, str], Pair] = {}
    for name, way in _NIXL.items():
        kind = (way.prefix, way.transport)  # reads and writes share a pair
        environ = {"UCX_TLS": way.transport} if way.transport else {}
        try:
            if kind not in pairs:
                opened = open_pair(str(python), "over_nixl", memories, way.prefix, **environ)
                pairs[kind] = stack.enter_context(opened)
        except (BrokenRun, OSError) as error:
            missing[name] = str(error)
        else:
            transfers[name] = partial(way.transfers, pairs[kind])
    return transfers, missing


# --- the report

RATE = Figure("GB/s", lambda row: row.num_bytes / statistics.median(row.took_s) / 1e9)
_CPU = (
    Figure("CPU us/block", lambda row: row.source_us + row.target_us),
    Figure("source", "source_us"),
    Figure("target", "target_us"),
)


def text(rows: Sequence[Row], cpu_rows: Sequence[CpuRow], missing: Mapping[str, str]) -> str:
    """Rates beside the limit of the same means, and beside the peer's fastest way in each round."""
    body, goals = [], []
    for size, mine in Rows(rows).each("block_bytes"):
        for limit, ours, peers in ((MEMCPY, SHM, _KERNEL), (SOCKET, TCP, _TCP)):
            fastest = [
                max(each.rows, key=RATE.value)
                for _, each in mine.only(lambda row, peers=peers: row.system in peers).each("round")  # type: ignore[misc]
            ]
            best, top = Rows(fastest), mine.where(system=limit)
            for system in (limit, ours, f"{ours}, checksums", *peers):
                each = mine.where(system=system)
                of_limit = each.over(top, RATE) if system != limit else None
                over_peer = each.over(best, RATE) if system in OURS else None
                if each:
                    body.append((f"{size >> 10} KiB", system, *each.cells([RATE]), of_limit, over_peer))
                if system == ours and of_limit:
                    name = f"{ours}, {size >> 10} KiB: {GOAL_OF_LIMIT:.0%} of {limit}"
                    goals.append(goal(name, of_limit.median >= GOAL_OF_LIMIT, of_limit))
                if system == ours and over_peer and size == GOAL_PEER_BYTES:
                    name = f"{ours}, {size >> 10} KiB: ahead of {NIXL}, its fastest way"
                    goals.append(goal(name, over_peer.median > 1, f"{over_peer.text()} x"))
        for system, plain in zip(OVER_TLS, (TCP, f"{TCP}, checksums"), strict=True):
            each = mine.where(system=system)
            if each:
                of_plain = each.over(mine.where(system=plain), RATE)
                body.append((f"{size >> 10} KiB", system, *each.cells([RATE]), of_plain, None))
    cpu_body = []
    for system, both_sides in Rows(cpu_rows).each("system"):
        cpu_body.append((system, *both_sides.cells(_CPU)))
        both = both_sides.fold(_CPU[0])
        name = f"{system}: under {GOAL_CPU_US:g} us of CPU per block, both sides"
        goals.append(goal(name, both.median < GOAL_CPU_US, both))
    parts = [
        table(("blocks", "system", RATE.title, "of its limit", f"x {NIXL}"), body),
        table((f"{cpu_rows[0].num_blocks:,} blocks", *(each.title for each in _CPU)), cpu_body),
        "\n".join(goals),
    ]
    return "\n\n".join([*parts, *(f"missing: {system}: {error}" for system, error in missing.items())])


if __name__ == "__main__":
    run(main)
