"""Trials on a ModelRunner: steps that belong to no request, as those of requests run.

They are put together by hand and write into blocks that nobody holds: before the first request nobody holds any, and
who takes a block writes to it before it is read. The scheduler and the pool never hear of them, so nothing is found,
told or counted afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.engines.native.runner import ModelRunner
from kvolt.engines.native.sampling.sampler import Row, sample
from kvolt.engines.native.step_trials import Trial, TrialRoom, Trials, measure_steps
from kvolt.kv import BlockId, Names
from kvolt.latency.fit import Errors
from kvolt.scheduler.sequence import Sequence
from kvolt.scheduler.step_plan import Limits, StepPlan, Work

log = logging.getLogger(__name__)

_HOST_LONG = (4, 4096)
"""Sequences with a long context, and what it comes to: pages of the host that nobody needs yet become real by it."""
_DEVICE_LONG = (32, 65_536)
_GREEDY = Sampling(temperature=0.0)
_TOLD_PROMPT = 512
"""Tokens of the prompt that the log names a time for."""


def measured_steps(runner: ModelRunner, limits: Limits, num_blocks: int, now: Callable[[], float]) -> Trials:
    """Steps of this engine as it is now."""
    on_gpu = runner.device.type == "cuda"
    long_batch, long_tokens = _DEVICE_LONG if on_gpu else _HOST_LONG
    room = TrialRoom(
        limits=limits,
        num_blocks=num_blocks,
        long_batch=min(long_batch, limits.max_num_seqs),
        long_tokens=long_tokens,
    )
    trials = measure_steps(TrialRunner(runner, limits.block_size).prepare, room, now)
    log.info("%s", told(trials))
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
            # Of its tokens a decode needs the last one only.
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
        """With blocks of its own: what several read, caches would hold, as they do not for requests."""
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
    """Nobody is to find these blocks."""

    names = Names()

    def reach(self, tokens: list[int], num_blocks: int) -> None:
        raise AssertionError("the blocks of a trial have no names")


def told(trials: Trials) -> str:
    """What came of them, in a line."""
    count, took_s, latency = trials.num_runs, trials.took_s, trials.latency
    if latency is None:
        return f"{count} steps measured in {took_s:.1f} s are too few: no step model is registered"
    one_ms, prompt_ms = 1e3 * latency.decode_s(1, _TOLD_PROMPT), 1e3 * latency.prefill_s(_TOLD_PROMPT)
    return (
        f"steps measured: {count} in {took_s:.1f} s; a decode takes {one_ms:.3g} ms, a prompt of {_TOLD_PROMPT} tokens "
        f"{prompt_ms:.3g} ms; median error {_percent(trials.decodes)} on decodes, {_percent(trials.prompts)} on prompts"
    )


def _percent(errors: Errors) -> str:
    return "?" if errors.median is None else f"{100 * errors.median:.0f} %"
