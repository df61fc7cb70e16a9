"""Seeded faults for a virtual cluster, and the command that runs many seeds.

python -m kvolt.testing.cluster.faults --seeds 1000       run seeds, each in two processes, and compare the logs
python -m kvolt.testing.cluster.faults --seed 17 --log    run one seed and print its log
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import IO, Any

from kvolt.runtime.supervisor.process import reap, start_blocking
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.cluster.cluster import Cluster
from kvolt.testing.cluster.process import TTL_S, ClusterProcess
from kvolt.testing.cluster.shape import draw_shape
from kvolt.testing.cluster.tally import RunReport
from kvolt.testing.virtual.loop import run_virtual

DURATION_S = 60.0
"""Duration of a run: faults, then recovery, then a last part in which every request must succeed."""
_FAULT_SHARE = 0.55
_RECOVERY_SHARE = 0.25
_MEAN_BETWEEN_FAULTS_S = 2.5
_START_S = 0.25
"""Time for workers to register before the first request, if no request may fail."""

LONGEST_STALL_S = 25.0
"""Below the grace period of stalled processes (`plane.stall_grace_s`)."""

_GC_THRESHOLD = 50_000
"""Allocations between collections: a run keeps most of its objects, so frequent collections are wasted."""

_STOPPED = 130
"""Exit code after Ctrl-C."""

Fault = Callable[[Cluster, random.Random], Coroutine[Any, Any, None]]


async def _for_a_while(cluster: Cluster, rng: random.Random, least_s: float, most_s: float) -> None:
    """Sleep for the duration of a fault, at most until the end of the fault phase."""
    now = asyncio.get_running_loop().time()
    await asyncio.sleep(min(rng.uniform(least_s, most_s), max(cluster.faults_end_at - now, 0.0)))


async def _crash(cluster: Cluster, process: ClusterProcess, rng: random.Random) -> None:
    await process.crash(silent=rng.random() < 0.5)
    await _for_a_while(cluster, rng, 0.1, 12.0)
    process.restart()


async def crash_worker(cluster: Cluster, rng: random.Random) -> None:
    await _crash(cluster, rng.choice(cluster.workers), rng)


async def crash_frontend(cluster: Cluster, rng: random.Random) -> None:
    await _crash(cluster, rng.choice(cluster.frontends), rng)


async def crash_router(cluster: Cluster, rng: random.Random) -> None:
    if cluster.routers:
        await _crash(cluster, rng.choice(cluster.routers), rng)


async def crash_discovery(cluster: Cluster, rng: random.Random) -> None:
    await _crash(cluster, cluster.discovery, rng)


def _two_hosts(cluster: Cluster, rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(cluster.processes, 2)
    return first.name, second.name


async def cut_links(cluster: Cluster, rng: random.Random) -> None:
    first, second = _two_hosts(cluster, rng)
    cluster.network.cut(first, second, silent=rng.random() < 0.5)


async def partition(cluster: Cluster, rng: random.Random) -> None:
    first, second = _two_hosts(cluster, rng)
    cluster.network.partition(first, second)
    await _for_a_while(cluster, rng, 0.5, 20.0)
    cluster.network.heal(first, second)


async def slow_link(cluster: Cluster, rng: random.Random) -> None:
    first, second = _two_hosts(cluster, rng)
    cluster.network.slow(first, second, latency_s=rng.uniform(0.02, 0.4), bytes_per_s=rng.uniform(2e3, 2e6))
    await _for_a_while(cluster, rng, 0.5, 10.0)
    cluster.network.slow(first, second, latency_s=0.0005, bytes_per_s=None)


async def stall_process(cluster: Cluster, rng: random.Random) -> None:
    """SIGSTOP, then SIGCONT, of a random process."""
    await _stall(cluster, [rng.choice(cluster.processes)], rng, 8.0)


async def _stall(
    cluster: Cluster, processes: Sequence[ClusterProcess], rng: random.Random, most_s: float
) -> None:
    for process in processes:
        cluster.note(f"{process.name} stalls")
        process.stall()
    await _for_a_while(cluster, rng, 0.2, most_s)
    for process in processes:
        cluster.note(f"{process.name} resumes")
        process.resume()


async def stall_in_turn(cluster: Cluster, rng: random.Random) -> None:
    """Stall the whole machine or some processes, with overlaps, until the end of the fault phase."""
    now = asyncio.get_running_loop().time
    stalls = TaskGroup("stalls", on_error=lambda error: cluster.fail(f"a stall failed: {error!r}"))
    while now() < cluster.faults_end_at:
        if rng.random() < 0.2:
            await _stall(cluster, cluster.processes, rng, LONGEST_STALL_S)
        else:
            for process in rng.sample(cluster.processes, rng.choice((1, 1, 2, 3))):
                stalls.start(
                    _stall(cluster, [process], random.Random(rng.getrandbits(64)), LONGEST_STALL_S),
                    process.name,
                )
                await _for_a_while(cluster, rng, 0.0, 6.0)
            await stalls.drain()
        await _for_a_while(cluster, rng, 4.0, 8.0)


async def lose_events(cluster: Cluster, rng: random.Random) -> None:
    cluster.event_loss = rng.uniform(0.05, 0.5)
    await _for_a_while(cluster, rng, 0.5, 10.0)
    cluster.event_loss = 0.0


async def damage_kv(cluster: Cluster, rng: random.Random) -> None:
    """Flip a bit in some of the blocks that are transferred between workers."""
    cluster.board.damaged_share = rng.uniform(0.02, 0.3)
    await _for_a_while(cluster, rng, 0.5, 10.0)
    cluster.board.damaged_share = 0.0


async def damage_tier(cluster: Cluster, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 8)):
        cluster.damage_tier(rng)
        await _for_a_while(cluster, rng, 0.0, 1.0)


FAULTS: Sequence[Fault] = (
    crash_worker,
    crash_worker,
    crash_frontend,
    crash_router,
    crash_discovery,
    cut_links,
    cut_links,
    partition,
    slow_link,
    stall_process,
    stall_process,
    lose_events,
    damage_kv,
    damage_tier,
)


async def run_cluster(seed: int, duration_s: float = DURATION_S) -> RunReport:
    """Run a cluster with random shape, load and faults. Raises Violation if an invariant breaks."""
    rng = random.Random(f"{seed}/faults")
    cluster = Cluster(seed, draw_shape(seed))
    runs = TaskGroup("run", on_error=lambda error: None)  # errors are raised below
    try:
        running = runs.start(_run(cluster, rng, duration_s), "run")
        failing = runs.start(cluster.has_failed.wait(), "failure")
        await asyncio.wait([running, failing], return_when=asyncio.FIRST_COMPLETED)
        cluster.check()
        report: RunReport = await running
        return report
    finally:
        await runs.close()
        await cluster.close()


async def _run(cluster: Cluster, rng: random.Random, duration_s: float) -> RunReport:
    loop = asyncio.get_running_loop()
    cluster.faults_end_at = loop.time() + _FAULT_SHARE * duration_s
    cluster.start()
    faults = TaskGroup("faults", on_error=lambda error: cluster.fail(f"a fault failed: {error!r}"))
    if cluster.shape.only_stalls:
        first_at = loop.time() + rng.uniform(0.5, 4.0)  # so that some requests are running
        await asyncio.sleep(_START_S)
        cluster.must_succeed = True
        await asyncio.sleep(first_at - loop.time())
        await stall_in_turn(cluster, rng)
    while (pause_s := rng.expovariate(1 / _MEAN_BETWEEN_FAULTS_S)) < cluster.faults_end_at - loop.time():
        await asyncio.sleep(pause_s)
        fault = rng.choice(FAULTS)
        cluster.note(f"fault {fault.__name__}")
        faults.start(fault(cluster, random.Random(rng.getrandbits(64))), fault.__name__)
    await asyncio.sleep(max(cluster.faults_end_at - loop.time(), 0.0))
    await faults.drain()
    await asyncio.sleep(_RECOVERY_SHARE * duration_s)
    cluster.must_succeed = cluster.is_healthy = True
    if _RECOVERY_SHARE * duration_s >= 3 * TTL_S:  # a restarted join server waits for two TTLs
        cluster.check_registered()
    await asyncio.sleep((1 - _FAULT_SHARE - _RECOVERY_SHARE) * duration_s)
    await cluster.stop()
    tally = cluster.tally
    return RunReport(
        cluster.seed,
        tuple(cluster.log),
        tally.started,
        tally.ok,
        dict(sorted(tally.failed.items())),
        tally.cut_short,
        {what: number for what, number in sorted(cluster.seen.items()) if number},
    )


def run_seed(seed: int, duration_s: float = DURATION_S) -> RunReport:
    return run_virtual(lambda: run_cluster(seed, duration_s), until_s=duration_s * 10 + 600)


def log_digest(report: RunReport) -> str:
    return hashlib.sha256("\n".join(report.log).encode()).hexdigest()


# --- command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="Run one seed in this process.")
    parser.add_argument("--log", action="store_true", help="With --seed: print the log.")
    parser.add_argument("--first", type=int, default=0, help="First seed. [default: 0]")
    parser.add_argument("--seeds", type=int, default=100, help="Number of seeds. [default: 100]")
    parser.add_argument(
        "--duration", type=float, default=DURATION_S, help="Virtual seconds per run. [default: 60]"
    )
    parser.add_argument(
        "--digests", action="store_true", help="Print seed, counts and log digest, one line per seed."
    )
    parser.add_argument("--until-bad", action="store_true", help="With --digests: stop at the first failure.")
    args = parser.parse_args(argv)
    if args.seed is not None:
        return _run_one(args.seed, args.duration, args.log)
    if args.digests:
        return _print_digests(range(args.first, args.first + args.seeds), args.duration, args.until_bad)
    try:
        return compare(range(args.first, args.first + args.seeds), args.duration)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return _STOPPED


def _run_one(seed: int, duration_s: float, show_log: bool) -> int:
    report = run_seed(seed, duration_s)
    if show_log:
        print("\n".join(report.log))
    print(
        f"seed {seed}: {report.started} requests, {report.ok} ok, failed {report.failed}, seen {report.seen}"
    )
    print(log_digest(report))
    return 0


def _print_digests(seeds: range, duration_s: float, until_bad: bool) -> int:
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    for seed in seeds:
        try:
            report = run_seed(seed, duration_s)
        except Exception as error:  # also errors of a virtual process
            print(f"{seed} FAILED {type(error).__name__}: {error}".replace("\n", " "), flush=True)
            if until_bad:
                break
            continue
        failed = sum(report.failed.values())
        print(
            f"{seed} {report.started} {report.ok} {failed} {report.cut_short} {log_digest(report)}",
            flush=True,
        )
    return 0


def compare(seeds: range, duration_s: float = DURATION_S) -> int:
    """Run every seed in two processes with different hash seeds and compare their logs byte by byte."""
    started = time.perf_counter()
    bad: list[str] = []
    totals = [0, 0, 0, 0]
    with ExitStack() as stack:
        runs = [_start_run(stack, seeds, duration_s, hash_seed) for hash_seed in ("1", "2")]
        progress = Progress(len(seeds))
        # In lockstep: the faster process waits in its pipe, and failures are reported early.
        for seed in seeds:
            first, second = (run.readline().strip() or f"{seed} FAILED the process died" for run in runs)
            if "FAILED" in first:
                bad.append(first)
            else:
                totals = [total + int(word) for total, word in zip(totals, first.split()[1:5], strict=True)]
            if first != second:
                bad.append(f"{seed} differs between two runs")
            progress.show(seed - seeds.start + 1, len(bad))
        progress.end()
    for line in bad:
        seed_again = line.split()[0]
        print(
            f"seed {line}\n  again: python -m kvolt.testing.cluster.faults --seed {seed_again} --log",
            file=sys.stderr,
        )
    num_requests, ok, failed, cut = totals
    print(
        f"{len(seeds)} seeds of {duration_s:g} virtual s, each in two processes: {len(bad)} bad; "
        f"{num_requests} requests, {ok} succeeded, {failed} typed errors, {cut} cut short; "
        f"{time.perf_counter() - started:.0f} s"
    )
    return 1 if bad else 0


class Progress:
    """Progress line on a terminal; no output otherwise."""

    def __init__(self, num_seeds: int) -> None:
        self._num_seeds = num_seeds
        self._shown = sys.stderr.isatty()
        self.show(0, 0)

    def show(self, num_done: int, num_bad: int) -> None:
        if self._shown:
            text = f"\r{num_done}/{self._num_seeds} seeds, {num_bad} bad"
            print(text, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print(file=sys.stderr)


def _start_run(stack: ExitStack, seeds: range, duration_s: float, hash_seed: str) -> IO[str]:
    """Start a process that prints a line per seed; leaving the stack ends it."""
    command = [sys.executable, "-m", "kvolt.testing.cluster.faults", "--digests"]
    command += ["--first", str(seeds.start), "--seeds", str(len(seeds)), "--duration", str(duration_s)]
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
    # In its own process group: Ctrl-C reaches only this process, which ends the child without a traceback.
    process = start_blocking(command, env=environ, stdout=subprocess.PIPE, text=True, process_group=0)
    stack.callback(reap, process)
    assert process.stdout is not None
    output: IO[str] = stack.enter_context(process.stdout)
    return output


if __name__ == "__main__":
    raise SystemExit(main())
