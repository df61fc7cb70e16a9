"""TrialRunner: runs trial steps on a ModelRunner, without requests.

Trials are built directly and write into free blocks: they run before the first request, and a block is written before
it is read. The scheduler and the pool are not involved, so trials leave no cached blocks, events or statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.engines.native.runner import ModelRunner
from kvolt.engines.native.sampling.sampler import Row, sample
from kvolt.engines.native.step_trials import Trial, TrialLimits, Trials, measure_steps
from kvolt.kv import BlockId, BlockNames
from kvolt.latency.fit import Errors
from kvolt.scheduler.sequence import Sequence
from kvolt.scheduler.step_plan import Limits, StepPlan, Work

log = logging.getLogger(__name__)

_HOST_LONG = (4, 4096)
"""Number of decodes with a long context, and their total context. Small on the host, because it allocates
unused pages."""
_DEVICE_LONG = (32, 65_536)
_GREEDY = Sampling(temperature=0.0)
_EXAMPLE_PROMPT = 512
"""Prompt length in the log line."""


def run_trials(runner: ModelRunner, limits: Limits, num_blocks: int, now: Callable[[], float]) -> Trials:
    """Measure the step times of an engine."""
    on_gpu = runner.device.type == "cuda"
    long_batch, long_tokens = _DEVICE_LONG if on_gpu else _HOST_LONG
    bounds = TrialLimits(
        limits=limits,
        num_blocks=num_blocks,
        long_batch=min(long_batch, limits.max_num_seqs),
        long_tokens=long_tokens,
    )
    trials = measure_steps(TrialRunner(runner, limits.block_size).prepare, bounds, now)
    log.log(logging.DEBUG if trials.latency is not None else logging.WARNING, "%s", trials_text(trials))
    return trials


class TrialRunner:
    def __init__(self, runner: ModelRunner, block_size: int) -> None:
        self._runner = runner
        self._block_size = block_size

    def prepare(self, trial: Trial) -> Callable[[], None]:
        plan = self._plan(trial)
        rows = [Row(_GREEDY, seed=0) for _ in range(trial.batch + trial.prompts)]

        def run() -> None:
            sample(self._runner.run(plan).logits, rows)
            self._runner.wait()

        return run

    def _plan(self, trial: Trial) -> StepPlan:
        decodes = [
            # A decode needs only the last of its tokens.
            Work(self._sequence(1, trial.context, number), trial.context - 1, 1)
            for number in range(trial.batch)
        ]
        length = trial.before + trial.chunk
        prefills = [
            Work(self._sequence(length, length, number), trial.before, trial.chunk)
            for number in range(trial.prompts)
        ]
        return StepPlan(decodes, prefills, trial.stats())

    def _sequence(self, num_tokens: int, context: int, number: int) -> Sequence:
        """A sequence with its own blocks: shared blocks would be in the hardware caches, unlike those of requests."""
        request = Request(
            request_id=RequestId("trial"),
            model="",
            token_ids=(0,) * num_tokens,
            stop=StopConditions(max_tokens=1),
            sampling=_GREEDY,
        )
        count = -(-context // self._block_size)
        blocks = [BlockId(block) for block in range(number * count, (number + 1) * count)]
        return Sequence(request, 0, _NoNaming(), blocks=blocks)


class _NoNaming:
    """Blocks of trials have no names, so that no request finds them."""

    names = BlockNames()

    def reach(self, tokens: list[int], num_blocks: int) -> None:
        raise AssertionError("the blocks of a trial have no names")


def trials_text(trials: Trials) -> str:
    """The results in one line, for the log."""
    count, elapsed_s, latency = trials.num_runs, trials.elapsed_s, trials.latency
    if latency is None:
        return (
            f"step calibration incomplete: steps={count} time={elapsed_s:.1f}s; step times are estimated from "
            "these steps: predicted costs and the choice of a prefill worker may be wrong until requests correct them"
        )
    one_ms, prompt_ms = 1e3 * latency.decode_s(1, _EXAMPLE_PROMPT), 1e3 * latency.prefill_s(_EXAMPLE_PROMPT)
    return (
        f"steps calibrated: steps={count} time={elapsed_s:.1f}s decode={one_ms:.3g}ms "
        f"prefill_{_EXAMPLE_PROMPT}={prompt_ms:.3g}ms decode_error={_percent(trials.decodes)} "
        f"prefill_error={_percent(trials.prompts)}"
    )


def _percent(errors: Errors) -> str:
    return "unknown" if errors.median is None else f"{100 * errors.median:.0f}%"
