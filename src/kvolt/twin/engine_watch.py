"""Statistics inside the engines of a run: utilization of each engine, and timing of each request.

Every engine reports its steps to an EngineWatch. The cost is a few additions per step, a little per prefill, and
nothing per token. Must not know what clients observe.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import msgspec

from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Tier
from kvolt.core.latency import StepModel, prompt_s
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.engines.sim.arguments import SimArguments, step_model_of
from kvolt.scheduler.step_plan import StepPlan, Work
from kvolt.twin.activity import Activity


@dataclass(slots=True)
class Visit:
    """One request in one engine. Times from the start of the run."""

    worker: EngineWatch
    started_s: float
    """Start of the first step with this request."""
    first_s: float | None = None
    """Time of the first token."""
    others_mark_s: float = 0.0
    """`EngineWatch.prompts_s` at the first token."""
    num_preemptions: int = 0
    num_preemptions_before_first: int = 0

    @property
    def prompts_since_s(self) -> float:
        """Additional step time since its first token caused by prefills of other requests."""
        return self.worker.prompts_s - self.others_mark_s


class EngineWatch:
    """StepObserver of one worker's engine."""

    def __init__(self, name: str, cluster: ClusterWatch, model: StepModel, speed: float) -> None:
        self.name = name
        self.busy_s = 0.0
        self.prompts_s = 0.0
        """Part of the busy time caused by prefills."""
        self.prompt_tokens = 0
        self.num_requests = 0
        self._num_waiting = 0
        self._cluster = cluster
        self._model = model
        self._speed = speed
        self._add = cluster.activity.add
        self._now = asyncio.get_running_loop().time
        self._joined_at = self._now()
        self._left_at: float | None = None

    def leave(self) -> None:
        """Mark the end of the worker."""
        self._left_at = self._now()

    def lifetime_s(self, end_s: float) -> float:
        """Lifetime of the worker within a run of this duration."""
        origin_s = self._cluster.origin_s
        left_at = origin_s + end_s if self._left_at is None else self._left_at
        return max(0.0, min(left_at - origin_s, end_s) - max(self._joined_at - origin_s, 0.0))

    def on_step(self, plan: StepPlan, time_s: float, load: WorkerLoad) -> None:
        end_s = self._now() - self._cluster.origin_s
        begin_s = max(end_s - time_s, 0.0)  # avoid negative rounding errors
        stats, prefills = plan.stats, plan.prefills
        self.busy_s += time_s
        waiting: float = load.waiting
        if waiting > self._num_waiting:
            waiting = self._waiting_during(load, time_s)
        self._num_waiting = load.waiting
        self._add(begin_s, end_s, stats.batch + len(prefills), waiting, load.kv_used_blocks)
        if prefills:
            self.prompt_tokens += stats.prefill_tokens
            self.prompts_s += time_s - self._decode_s(stats)
            for work in prefills:
                self._record_prefill(work, begin_s, end_s)

    def _waiting_during(self, load: WorkerLoad, time_s: float) -> float:
        """Mean number of waiting requests during the step, if more wait now: they arrived halfway through.

        A merged run of steps ends with the step in which a request arrived.
        """
        arrived = load.waiting - self._num_waiting
        last_s = load.step.time_s if load.step is not None else 0.0
        return self._num_waiting + arrived * 0.5 * last_s / time_s if time_s else load.waiting

    def _decode_s(self, stats: StepStats) -> float:
        """Predicted step time without prefills."""
        if not stats.batch:
            return 0.0
        alone = msgspec.structs.replace(stats, prefill_tokens=0, prefill_context=0)
        return self._model.step_s(alone) / self._speed

    def _record_prefill(self, work: Work, begin_s: float, end_s: float) -> None:
        sequence = work.sequence
        visits, request_id = self._cluster.visits, sequence.request.request_id
        visit = visits.get(request_id)
        if visit is None:
            visit = visits[request_id] = Visit(self, begin_s)
            self.num_requests += 1
        # A preempted request is prefilled again, so preemptions are detected here.
        visit.num_preemptions = sequence.num_preemptions
        if visit.first_s is None and sequence.has_output:
            visit.first_s = end_s
            visit.others_mark_s = self.prompts_s
            visit.num_preemptions_before_first = sequence.num_preemptions


class ClusterWatch:
    """Statistics of all engines of a run."""

    def __init__(self, engine: SimArguments) -> None:
        self._engine = engine
        self._model = step_model_of(engine)
        self.origin_s = 0.0
        """Start of the run by the loop's clock."""
        self.ended_s: float | None = None
        """End of the last request, from the start."""
        self.activity = Activity()
        self.workers: list[EngineWatch] = []
        self.visits: dict[RequestId, Visit] = {}
        """Visits of running requests."""
        self.num_preemptions = 0
        self.onboarded_tokens: Counter[Tier] = Counter()
        """Prompt tokens onboarded from each lower tier; set at the end."""

    def add_worker(self, name: str) -> EngineWatch:
        """Create the watch of an engine, on its loop."""
        watch = EngineWatch(name, self, self._model, self._engine.speed)
        self.workers.append(watch)
        return watch

    def end_visit(self, request_id: RequestId) -> Visit | None:
        """Remove and return the visit of an ended request; None if no engine computed it."""
        visit = self.visits.pop(request_id, None)
        if visit is not None:
            self.num_preemptions += visit.num_preemptions
        return visit

    def prompt_alone_s(self, num_tokens: int, num_cached: int) -> float:
        """Prefill time of a prompt on an idle worker."""
        alone_s = prompt_s(self._model, num_tokens, num_cached, self._engine.max_batch_tokens)
        return alone_s / self._engine.speed
