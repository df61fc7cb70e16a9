"""What is seen inside the engines of a run: how busy each was, and how each request fared in its one.

Owns the counting; every engine tells of its steps through an EngineWatch. Per step it costs a few additions, per
step with prompts a little for each of them, per token nothing. Must not know what clients see of the answers.
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
    began_s: float
    """When the first step began that computed any of it."""
    first_s: float | None = None
    """When its first token was there."""
    others_mark_s: float = 0.0
    """`EngineWatch.prompts_s` at that time."""
    num_preemptions: int = 0
    num_preemptions_before_first: int = 0

    @property
    def prompts_since_s(self) -> float:
        """How much longer steps took since its first token because of the prompts of others in them."""
        return self.worker.prompts_s - self.others_mark_s


class EngineWatch:
    """A StepWatch: one worker's engine."""

    def __init__(self, name: str, cluster: ClusterWatch, model: StepModel, speed: float) -> None:
        self.name = name
        self.busy_s = 0.0
        self.prompts_s = 0.0
        """How much of that was for prompts: what its steps would not have taken without them."""
        self.prompt_tokens = 0
        self.num_requests = 0
        self._num_waiting = 0
        self._cluster = cluster
        self._model = model
        self._speed = speed
        self._add = cluster.activity.add
        self._now = asyncio.get_running_loop().time
        self._came_at = self._now()
        self._left_at: float | None = None

    def leave(self) -> None:
        """It is there no more."""
        self._left_at = self._now()

    def lifetime_s(self, end_s: float) -> float:
        """Of a run that took so long, how long it was there."""
        origin_s = self._cluster.origin_s
        left_at = origin_s + end_s if self._left_at is None else self._left_at
        return max(0.0, min(left_at - origin_s, end_s) - max(self._came_at - origin_s, 0.0))

    def on_step(self, plan: StepPlan, time_s: float, load: WorkerLoad) -> None:
        end_s = self._now() - self._cluster.origin_s
        begin_s = max(end_s - time_s, 0.0)  # the rounding of times
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
                self._see(work, begin_s, end_s)

    def _waiting_during(self, load: WorkerLoad, time_s: float) -> float:
        """On average over what has just ended, when more wait now: they came halfway through.

        A run of many steps ends with the one in which somebody came.
        """
        came = load.waiting - self._num_waiting
        last_s = load.step.time_s if load.step is not None else 0.0
        return self._num_waiting + came * 0.5 * last_s / time_s if time_s else load.waiting

    def _decode_s(self, stats: StepStats) -> float:
        """What the step would have taken without prompts."""
        if not stats.batch:
            return 0.0
        alone = msgspec.structs.replace(stats, prefill_tokens=0, prefill_context=0)
        return self._model.step_s(alone) / self._speed

    def _see(self, work: Work, begin_s: float, end_s: float) -> None:
        sequence = work.sequence
        visits, request_id = self._cluster.visits, sequence.request.request_id
        visit = visits.get(request_id)
        if visit is None:
            visit = visits[request_id] = Visit(self, begin_s)
            self.num_requests += 1
        # Whoever was preempted comes back as a prompt, so this is where it shows.
        visit.num_preemptions = sequence.num_preemptions
        if visit.first_s is None and sequence.has_spoken:
            visit.first_s = end_s
            visit.others_mark_s = self.prompts_s
            visit.num_preemptions_before_first = sequence.num_preemptions


class ClusterWatch:
    """All engines of one run."""

    def __init__(self, engine: SimArguments) -> None:
        self._engine = engine
        self._model = step_model_of(engine)
        self.origin_s = 0.0
        """The start of the run by the loop's clock."""
        self.ended_s: float | None = None
        """When the last request had ended, from the start."""
        self.activity = Activity()
        self.workers: list[EngineWatch] = []
        self.visits: dict[RequestId, Visit] = {}
        """Of the requests under way, by id."""
        self.num_preemptions = 0
        self.brought_tokens: Counter[Tier] = Counter()
        """Of prompts, those whose KV came from below a device, by where it lay. Known at the end."""

    def add_worker(self, name: str) -> EngineWatch:
        """The watch for one more engine; on the loop that it runs on."""
        watch = EngineWatch(name, self, self._model, self._engine.speed)
        self.workers.append(watch)
        return watch

    def take(self, request_id: RequestId) -> Visit | None:
        """How a request fared that is over now; None if no engine ever computed any of it."""
        visit = self.visits.pop(request_id, None)
        if visit is not None:
            self.num_preemptions += visit.num_preemptions
        return visit

    def prompt_alone_s(self, num_tokens: int, num_cached: int) -> float:
        """What a prompt takes of which so much is cached, if nobody else is there."""
        alone_s = prompt_s(self._model, num_tokens, num_cached, self._engine.max_batch_tokens)
        return alone_s / self._engine.speed
