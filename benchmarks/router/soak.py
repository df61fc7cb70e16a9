"""Two virtual hours at 100 requests/s through the whole path, undisturbed and disturbed: what does trouble cost?

    python -m benchmarks.router.soak                 both runs, a core each, some half an hour; results/soak.{json,txt}
    python -m benchmarks.router.soak --minutes 20    shorter, kept as well
    python -m benchmarks.router.soak --quick         three virtual minutes at 20 requests/s, not kept

Chats of the project's own recipe (`RECIPE`) on 32 workers in the twin, routed by `latency`. Disturbed: the event plane
loses 1 % of all events, every minute a worker comes and another one finishes what it has and goes, with its cache, and
every ten minutes the router begins anew with an empty index. Times are virtual: the machine may be busy with other
things. A run that has ended is not run again (--folder, KVOLT_BENCH), unless kvolt's sources have changed.

Hit rates are of the time after the first tenth of a run. Flat: the most that the index, and the process, had in the
last third over the most they had in the second.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from benchmarks.frontend.report import goal, table
from benchmarks.router.event_soak import GOAL_FLAT, GOAL_RESIDENT, resident_bytes
from benchmarks.router.gains_runs import in_processes
from benchmarks.router.kept_rows import KeptRows, default_folder
from benchmarks.runtime.report import keep_results, machine

from kvolt.bench.load.sample import Sample
from kvolt.bench.traces import Recipe, make_trace
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.router.event_fed_router import ExactRouter
from kvolt.router.queue.queue_router import who_decides
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.faults import Trouble
from kvolt.twin.replay import TwinRun, new_tally

_RESULTS = Path(__file__).parent / "results" / "soak"
_BLOCK_SIZE = 64
RECIPE = Recipe(seed=6, block_size=_BLOCK_SIZE)
"""Chats of three turns: system prompts of about 1,000 tokens, questions and answers of some 250, 15 s to think."""
CALM, TROUBLED = "undisturbed", "disturbed"
GOAL_POINTS = 2.0
INDEX_BYTES = 16 << 20
"""The router's cap: a few times what the workers hold."""
_LOOKS_PER_MINUTE = 6
_MIB = 1 << 20


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    name: str
    minutes: float
    rate_per_s: float
    num_workers: int
    trouble: Trouble
    kv_blocks: int = 4096

    @property
    def num_requests(self) -> int:
        return round(60 * self.minutes * self.rate_per_s)


class Minute(msgspec.Struct):
    """Requests that came within it."""

    num_whole: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    """Of all together."""


class Look(msgspec.Struct, frozen=True):
    at_s: float
    index_bytes: int
    resident_bytes: int


class Soaked(msgspec.Struct, frozen=True):
    plan: Plan
    wall_s: float
    minutes: list[Minute]
    looks: list[Look]
    errors: dict[str, int]
    num_workers: int
    """That there ever were."""

    @property
    def hit_rate(self) -> float:
        """After the first tenth."""
        later = self._later()
        return sum(each.cached_tokens for each in later) / max(sum(each.input_tokens for each in later), 1)

    @property
    def ttft_mean_ms(self) -> float:
        later = self._later()
        return 1e3 * sum(each.ttft_s for each in later) / max(sum(each.num_whole for each in later), 1)

    def _later(self) -> Sequence[Minute]:
        return self.minutes[len(self.minutes) // 10 :]


class _Watcher:
    """What is seen of a run while it goes on."""

    def __init__(self, run: TwinRun) -> None:
        self._run = run
        self.minutes: list[Minute] = []
        self.looks: list[Look] = []
        self.errors: dict[str, int] = {}

    def on_sample(self, sample: Sample) -> None:
        while len(self.minutes) <= sample.due_s / 60:
            self.minutes.append(Minute())
        minute = self.minutes[int(sample.due_s / 60)]
        if sample.error is None and sample.first_s is not None:
            minute.num_whole += 1
            minute.input_tokens += sample.input_tokens
            minute.cached_tokens += sample.cached_tokens or 0
            minute.ttft_s += sample.first_s - sample.due_s
        else:
            minute.num_failed += 1
            code = sample.error or "no first token"
            self.errors[code] = self.errors.get(code, 0) + 1
        last_s = self.looks[-1].at_s if self.looks else 0.0
        if sample.end_s - last_s >= 60 / _LOOKS_PER_MINUTE:
            self._look(sample.end_s)

    def _look(self, at_s: float) -> None:
        assert self._run.cluster is not None
        router = who_decides(self._run.cluster.road.router)
        assert isinstance(router, ExactRouter)
        index = router.index
        self.looks.append(Look(at_s, index.num_bytes, resident_bytes()))
        if len(self.looks) % (10 * _LOOKS_PER_MINUTE) == 0:
            done = sum(minute.num_whole for minute in self.minutes)
            name = CALM if self._run.settings.trouble == Trouble() else TROUBLED
            print(
                f"{name}: {at_s / 60:.0f} virtual minutes, {done:,} answers, "
                f"index {index.num_bytes / _MIB:.1f} MiB",
                file=sys.stderr,
                flush=True,
            )


def solve(plan: Plan) -> Soaked:
    started = time.perf_counter()
    settings = TwinSettings(
        num_workers=plan.num_workers,
        router="latency",
        routing=RouterSettings(index_max_bytes=INDEX_BYTES),
        engine=SimArguments(
            preset="dynamo-mocker", block_size=_BLOCK_SIZE, kv_blocks=plan.kv_blocks, context_length=65_536
        ),
        trouble=plan.trouble,
    )
    run = TwinRun(settings, new_tally(settings))
    watcher = _Watcher(run)
    run.run(_records(plan), watcher.on_sample)
    return Soaked(
        plan=plan,
        wall_s=time.perf_counter() - started,
        minutes=watcher.minutes,
        looks=watcher.looks,
        errors=watcher.errors,
        num_workers=len(run.watch.workers),
    )


def _records(plan: Plan) -> Iterator[TraceRecord]:
    recipe = msgspec.structs.replace(RECIPE, requests=plan.num_requests, rate_per_s=plan.rate_per_s)
    return make_trace(recipe)


def plans(minutes: float, rate_per_s: float, num_workers: int, trouble: Trouble) -> tuple[Plan, Plan]:
    return (
        Plan(CALM, minutes, rate_per_s, num_workers, Trouble()),
        Plan(TROUBLED, minutes, rate_per_s, num_workers, trouble),
    )


def growth(values: Sequence[float]) -> float:
    """The most in the last third over the most in the second."""
    third = len(values) // 3
    return max(values[2 * third :]) / max(values[third : 2 * third])


def report(calm: Soaked, troubled: Soaked) -> str:
    body, goals = [], []
    for run in (calm, troubled):
        index, resident = (
            [getattr(look, name) for look in run.looks] for name in ("index_bytes", "resident_bytes")
        )
        body.append(
            (
                run.plan.name,
                f"{sum(minute.num_whole for minute in run.minutes):,}",
                ", ".join(f"{number} {code}" for code, number in run.errors.items()) or "0",
                str(run.num_workers),
                f"{100 * run.hit_rate:.2f}",
                f"{run.ttft_mean_ms:.1f}",
                f"{max(index) / _MIB:.1f}",
                f"{growth(index):.3f}",
                f"{growth(resident):.3f}",
                f"{run.wall_s / 60:.0f}",
            )
        )
        goals += [
            goal(f"{run.plan.name}: index flat", growth(index) <= GOAL_FLAT, f"x{growth(index):.3f}"),
            goal(f"{run.plan.name}: index under its cap", max(index) <= INDEX_BYTES, f"{max(index):,}"),
            goal(
                f"{run.plan.name}: process flat",
                growth(resident) <= GOAL_RESIDENT,
                f"x{growth(resident):.3f}",
            ),
            goal(
                f"{run.plan.name}: every request answered", not run.errors, f"{sum(run.errors.values())} not"
            ),
        ]
    points = 100 * (troubled.hit_rate - calm.hit_rate)
    name = f"hit rate of the disturbed run within {GOAL_POINTS:g} points of the undisturbed"
    head = ("run", "answers", "failed", "workers", "hit rate %", "TTFT mean ms", "index MiB", "index growth")
    return "\n".join(
        [
            f"{calm.plan.minutes:g} virtual minutes at {calm.plan.rate_per_s:g} requests/s",
            table((*head, "process growth", "wall minutes"), body),
            goal(name, abs(points) <= GOAL_POINTS, f"{points:+.2f} points"),
            *goals,
        ]
    )


def main() -> None:
    options = _options()
    if options.quick:
        trouble = Trouble(event_loss=0.01, router_restart_s=60.0, churn_s=30.0)
        wanted = plans(3.0, 20.0, 8, trouble)
    else:
        trouble = Trouble(event_loss=0.01, router_restart_s=600.0, churn_s=60.0)
        wanted = plans(options.minutes, 100.0, 32, trouble)
    found = machine()
    kept = KeptRows(options.folder / "soak.jsonl", Soaked)
    left = [plan for plan in wanted if kept.get(str(plan)) is None]
    try:
        for run in in_processes(solve, left, min(options.processes, len(left) or 1)):
            kept.add(str(run.plan), run)
    except KeyboardInterrupt:
        sys.exit(130)
    calm, troubled = (kept.get(str(plan)) for plan in wanted)
    assert calm is not None
    assert troubled is not None
    text = report(calm, troubled)
    print(text)
    if not options.quick:
        keep_results(_RESULTS, "benchmarks.router.soak", found, text, {"runs": [calm, troubled]})
    kept.close(is_over=not options.quick)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="three minutes at a low rate; nothing is kept")
    parser.add_argument("--minutes", type=float, default=120.0, help="of virtual time (default: 120)")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="runs that have ended")
    return parser.parse_args()


if __name__ == "__main__":
    main()
