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

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
from benchmarks.harness import BrokenRun, Missing, in_turn, parser_for, report, run, say
from benchmarks.processes import installed_python
from benchmarks.transfer import paths_report
from benchmarks.transfer.memories import Memories, arrived
from benchmarks.transfer.over_kvolt import FEW_BLOCKS, FEW_BYTES
from benchmarks.transfer.pair import Pair, open_pair
from benchmarks.transfer.paths_report import CpuRow, Row
from msgspec.structs import replace

from kvolt.transfer.memory import block_bytes

Transfers = Callable[[int, int], Sequence[float]]
"""Seconds of each transfer, given bytes of a block and a count."""


class Plan(msgspec.Struct, frozen=True):
    rounds: int
    num_bytes: int
    block_sizes: tuple[int, ...]
    transfers: int
    """Of a system in a round; one more is not counted."""
    small_reads: int
    """Of which the CPU is taken together."""


_SIZES = (64 << 10, 256 << 10, 1 << 20)
_FULL = Plan(rounds=15, num_bytes=64 << 20, block_sizes=_SIZES, transfers=5, small_reads=200)
_SMOKE = Plan(rounds=1, num_bytes=4 << 20, block_sizes=_SIZES[:2], transfers=1, small_reads=2)


class Systems:
    """All that take turns, and why some do not."""

    def __init__(self) -> None:
        self.transfers: dict[str, Transfers] = {}
        self.missing: dict[str, str] = {}

    def drop(self, name: str, error: object) -> None:
        self.transfers.pop(name, None)
        self.missing[name] = str(error)


def main() -> None:
    options = parser_for(__file__, __doc__, peer=paths_report.NIXL).parse_args()
    if not block_bytes.IS_NATIVE:
        raise Missing("kvolt's native bytes: install a C compiler, then `pip install -e .`")
    plan = _SMOKE if options.smoke else _FULL
    rows, cpu_rows, missing = _measured(plan, options.peer_dir, not options.smoke)
    text = "\n\n".join([_about(plan), paths_report.text(rows, cpu_rows, missing)])
    results = {
        "peer": paths_report.NIXL,
        "plan": plan,
        "missing": missing,
        "rows": rows,
        "cpu_rows": cpu_rows,
    }
    report(options, text, results)


def _measured(
    plan: Plan, peer_dir: Path, may_install: bool
) -> tuple[list[Row], list[CpuRow], dict[str, str]]:
    rows: list[Row] = []
    cpu_rows: list[CpuRow] = []
    with ExitStack() as stack:
        memories = Memories.new(plan.num_bytes)
        stack.callback(memories.close)
        kvolt = stack.enter_context(open_pair(sys.executable, "over_kvolt", memories))
        systems = Systems()
        systems.transfers |= _of_kvolt(kvolt)
        _add_nixl(systems, stack, memories, peer_dir, may_install)
        for number in range(plan.rounds):
            rows += _round(plan, number, systems, memories)
            cpu_rows += _cpu_round(plan, number, kvolt)
    return rows, cpu_rows, systems.missing


def _round(plan: Plan, number: int, systems: Systems, memories: Memories) -> list[Row]:
    rows = []
    source, target = memories.map_source_to_read(), memories.map_target()
    for size in plan.block_sizes:
        names = list(systems.transfers)
        for name in in_turn(names, number):
            target[:] = 0
            try:
                took_s = systems.transfers[name](size, 1 + plan.transfers)[1:]
            except BrokenRun as error:
                if name not in _NIXL:
                    raise
                systems.drop(name, error)
                continue
            is_in_order = name in (paths_report.MEMCPY, paths_report.SOCKET)
            if not arrived(source, target, plan.num_bytes if is_in_order else size):
                raise BrokenRun(f"{name} left other bytes at the target than were at the source")
            row = Row(number, name, size, plan.num_bytes, tuple(took_s))
            rows.append(row)
            say(f"round {number + 1}  {size >> 10:5} KiB  {name:24} {row.gb_per_s:.2f} GB/s")
    return rows


def _of_kvolt(pair: Pair) -> dict[str, Transfers]:
    def read(path: str, is_checked: bool, size: int, count: int) -> Sequence[float]:
        tickets = pair.source.ask("offer", path=path, block_bytes=size, count=count)["tickets"]
        asked = {"path": path, "block_bytes": size, "tickets": tickets, "is_checked": is_checked}
        took_s: Sequence[float] = pair.target.ask("read", **asked)["took_s"]
        pair.source.ask("settle")
        return took_s

    def limit(do: str, size: int, count: int) -> Sequence[float]:
        took_s: Sequence[float] = pair.target.ask(do, count=count)["took_s"]
        return took_s

    return {
        paths_report.MEMCPY: partial(limit, "memcpy"),
        paths_report.SHM: partial(read, "shm", False),
        paths_report.SHM_CHECKED: partial(read, "shm", True),
        paths_report.SOCKET: partial(limit, "socket"),
        paths_report.TCP: partial(read, "tcp", False),
        paths_report.TCP_CHECKED: partial(read, "tcp", True),
    }


def _cpu_round(plan: Plan, number: int, pair: Pair) -> list[CpuRow]:
    rows = []
    for name, path, is_checked in (
        (paths_report.SHM, "shm", False),
        (paths_report.SHM_CHECKED, "shm", True),
        (paths_report.TCP, "tcp", False),
        (paths_report.TCP_CHECKED, "tcp", True),
    ):
        before = pair.source.ask("mark")["cpu_s"], pair.target.ask("mark")["cpu_s"]
        of_blocks = {"path": path, "block_bytes": FEW_BYTES}
        tickets = pair.source.ask("offer", **of_blocks, count=plan.small_reads)["tickets"]
        pair.target.ask("read", **of_blocks, tickets=tickets, is_checked=is_checked)
        after = pair.source.ask("settle")["cpu_s"], pair.target.ask("mark")["cpu_s"]
        num_blocks = plan.small_reads * FEW_BLOCKS
        used_us = [(then - now) / num_blocks * 1e6 for now, then in zip(before, after, strict=True)]
        rows.append(CpuRow(number, name, FEW_BLOCKS, *used_us))
        say(f"round {number + 1}  {name:24} {rows[-1].both_us:.2f} us of CPU per small block")
    return rows


class NixlWay(msgspec.Struct, frozen=True):
    operation: str
    is_private: bool = False
    is_tcp: bool = False

    def open(self, python: Path, memories: Memories) -> AbstractContextManager[Pair]:
        sides = ("PrivateSource", "PrivateTarget") if self.is_private else ("Source", "Target")
        environ = {"UCX_TLS": "tcp"} if self.is_tcp else {}
        return open_pair(str(python), "over_nixl", memories, sides, **environ)

    def transfers(self, pair: Pair, size: int, count: int) -> Sequence[float]:
        is_read = self.operation == "READ"
        who, other = (pair.target, pair.source) if is_read else (pair.source, pair.target)
        if self.is_private:
            pair.target.ask("clear")
        other.poll()
        try:
            asked = {"operation": self.operation, "block_bytes": size, "count": count}
            took_s: Sequence[float] = who.ask("move", **asked)["took_s"]
        finally:
            with suppress(BrokenRun):  # the first error is the one to tell
                other.ask("hello")  # which ends its polling
        if self.is_private:
            pair.target.ask("show")
        return took_s


_NIXL = {
    paths_report.NIXL_READ: NixlWay("READ"),
    paths_report.NIXL_WRITE: NixlWay("WRITE"),
    paths_report.NIXL_PRIVATE_READ: NixlWay("READ", is_private=True),
    paths_report.NIXL_PRIVATE_WRITE: NixlWay("WRITE", is_private=True),
    paths_report.NIXL_TCP_READ: NixlWay("READ", is_tcp=True),
    paths_report.NIXL_TCP_WRITE: NixlWay("WRITE", is_tcp=True),
}


def _add_nixl(
    systems: Systems, stack: ExitStack, memories: Memories, peer_dir: Path, may_install: bool
) -> None:
    try:
        python = installed_python(
            peer_dir / "nixl",
            "import nixl_cu12._api",
            f"{paths_report.NIXL} (0.4 GB)",
            # It names torch as a dependency, and works without.
            (["numpy"], ["--no-deps", f"nixl-cu12=={paths_report.NIXL_VERSION}"]),
            may_install=may_install,
        )
    except BrokenRun as error:
        for name in _NIXL:
            systems.drop(name, error)
        return
    pairs: dict[NixlWay, Pair] = {}
    for name, way in _NIXL.items():
        kind = replace(way, operation="")  # reads and writes share a pair
        try:
            if kind not in pairs:
                pairs[kind] = stack.enter_context(kind.open(python, memories))
        except (BrokenRun, OSError) as error:
            systems.drop(name, error)
        else:
            systems.transfers[name] = partial(way.transfers, pairs[kind])


def _about(plan: Plan) -> str:
    return (
        f"{plan.rounds} rounds of {plan.transfers} transfers of {plan.num_bytes >> 20} MiB in scattered blocks; "
        f"CPU over {plan.small_reads} reads of {FEW_BLOCKS:,} blocks of {FEW_BYTES} bytes a round."
    )


if __name__ == "__main__":
    run(main)
