"""Cost of faults: two virtual hours at 100 requests/s through the whole path, with and without faults.

    python -m benchmarks.router.soak                 both runs, a core each, some half an hour; results/soak.{json,txt}
    python -m benchmarks.router.soak --minutes 20    shorter, kept as well

Chats of the project's own recipe (`RECIPE`) on 32 workers in the twin, routed by `latency`. Faults: the event plane
loses 1 % of all events, every minute a worker joins and another one drains and leaves with its cache, and every ten
minutes the router restarts with an empty index. Times are virtual, independent of the load of the machine. A complete
run is not repeated (--folder, KVOLT_BENCH), unless kvolt's sources have changed.

Hit rates exclude the first tenth of a run. Flat: maximum size of the index, and of the process, in the last third over
the maximum in the second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
import psutil
from benchmarks.harness import Figure, goal, row_table, run, say
from benchmarks.harness import report as write_report
from benchmarks.studies import KeptRows, parse_study, study_parser

from kvolt.bench.load.sample import Sample
from kvolt.bench.traces import Recipe, make_trace
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.queue.queue_router import deciding_router
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.faults import Faults
from kvolt.twin.replay import TwinRun, new_tally

_BLOCK_SIZE = 64
RECIPE = Recipe(seed=6, block_size=_BLOCK_SIZE)
"""Chats of three turns: system prompts of about 1,000 tokens, questions and answers of some 250, 15 s to think."""
CALM, TROUBLED = "undisturbed", "disturbed"
GOAL_POINTS = 2.0
GOAL_FLAT = {"index": 1.05, "process": 1.15}
"""Largest growth of the index and of the process's memory."""
INDEX_BYTES = 16 << 20
"""Limit of the router's index: several times the blocks of the workers."""
_LOOKS_PER_MINUTE = 6
_MIB = 1 << 20


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    name: str
    minutes: float
    rate_per_s: float
    num_workers: int
    faults: Faults
    kv_blocks: int = 4096

    @property
    def num_requests(self) -> int:
        return round(60 * self.minutes * self.rate_per_s)


class Minute(msgspec.Struct):
    """Requests that arrived within the minute."""

    num_whole: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    """Sum over the requests."""


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
    """Workers that were ever registered."""

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
    """Samples taken during a run."""

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
        router = deciding_router(self._run.cluster.journey_context.router)
        assert isinstance(router, EventFedRouter)
        index = router.block_index
        self.looks.append(Look(at_s, index.num_bytes, psutil.Process().memory_info().rss))
        if len(self.looks) % (10 * _LOOKS_PER_MINUTE) == 0:
            done = sum(minute.num_whole for minute in self.minutes)
            name = CALM if self._run.settings.faults == Faults() else TROUBLED
            say(
                f"{name}: {at_s / 60:.0f} virtual minutes, {done:,} answers, "
                f"index {index.num_bytes / _MIB:.1f} MiB"
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
        faults=plan.faults,
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


def plans(minutes: float, rate_per_s: float, num_workers: int, faults: Faults) -> tuple[Plan, Plan]:
    return (
        Plan(CALM, minutes, rate_per_s, num_workers, Faults()),
        Plan(TROUBLED, minutes, rate_per_s, num_workers, faults),
    )


def growth(values: Sequence[float]) -> float:
    """Maximum in the last third over the maximum in the second."""
    third = len(values) // 3
    return max(values[2 * third :]) / max(values[third : 2 * third])


def growths(soaked: Soaked) -> dict[str, float]:
    return {
        "index": growth([look.index_bytes for look in soaked.looks]),
        "process": growth([look.resident_bytes for look in soaked.looks]),
    }


FIGURES = (
    Figure("run", "plan.name", ""),
    Figure("answers", lambda run: sum(minute.num_whole for minute in run.minutes), ","),
    Figure("failed", lambda run: ", ".join(f"{num} {code}" for code, num in run.errors.items()) or "0", ""),
    Figure("workers", "num_workers", ""),
    Figure("hit rate %", lambda run: 100 * run.hit_rate, ".2f"),
    Figure("TTFT mean ms", "ttft_mean_ms", ".1f"),
    Figure("index MiB", lambda run: max(look.index_bytes for look in run.looks) / _MIB, ".1f"),
    Figure("index growth", lambda run: growths(run)["index"], ".3f"),
    Figure("process growth", lambda run: growths(run)["process"], ".3f"),
    Figure("wall minutes", lambda run: run.wall_s / 60, ".0f"),
)


def report(calm: Soaked, troubled: Soaked) -> str:
    points = 100 * (troubled.hit_rate - calm.hit_rate)
    name = f"hit rate of the disturbed run within {GOAL_POINTS:g} points of the undisturbed"
    goals = [goal(name, abs(points) <= GOAL_POINTS, f"{points:+.2f} points")]
    for soaked in (calm, troubled):
        most, num_failed = max(look.index_bytes for look in soaked.looks), sum(soaked.errors.values())
        goals += [
            goal(f"{soaked.plan.name}: {name} flat", grown <= GOAL_FLAT[name], f"x{grown:.3f}")
            for name, grown in growths(soaked).items()
        ]
        goals.append(goal(f"{soaked.plan.name}: index under its cap", most <= INDEX_BYTES, f"{most:,}"))
        goals.append(
            goal(f"{soaked.plan.name}: every request answered", not soaked.errors, f"{num_failed} not")
        )
    about = f"{calm.plan.minutes:g} virtual minutes at {calm.plan.rate_per_s:g} requests/s"
    return "\n".join([about, row_table(FIGURES, (calm, troubled)), *goals])


def main() -> None:
    parser = study_parser(__file__, __doc__)
    parser.add_argument("--minutes", type=float, default=120.0, help="virtual time (default: %(default)s)")
    options = parse_study(parser)
    if options.smoke:
        wanted = plans(1.0, 5.0, 2, Faults(event_loss=0.01, router_restart_s=30.0, churn_s=20.0))
    else:
        faults = Faults(event_loss=0.01, router_restart_s=600.0, churn_s=60.0)
        wanted = plans(options.minutes, 100.0, 32, faults)
    kept = KeptRows(options.folder, "soak", Soaked)
    calm, troubled = kept.solve(solve, wanted, options.processes)
    write_report(options, report(calm, troubled), {"runs": [calm, troubled]})
    kept.remove()


if __name__ == "__main__":
    run(main)
