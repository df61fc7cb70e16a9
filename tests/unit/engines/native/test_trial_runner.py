"""An engine that has measured itself: it says how long its steps take, and is otherwise as if it had not."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.engines.native.equality_lab import answer, ask, assert_at_rest, core_of, make_prompts

from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats, decode_step_log
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native import loading, trial_runner
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.batch import Batch
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.loading import CoreHooks, build_core, load_core
from kvolt.engines.native.step_trials import Trial, Trials
from kvolt.engines.native.trial_runner import TrialRunner, trials_text
from kvolt.models.checkpoint import open_checkpoint
from kvolt.runtime.host.cores import usable_cores
from kvolt.scheduler.step_pace import StepPace
from kvolt.testing.tiny_models import tiny_checkpoint

PROMPTS = make_prompts(seed=2, vocabulary=900)
TRIALS = [
    Trial(batch=1, context=16),
    Trial(batch=5, context=33),
    Trial(prompts=1, chunk=20),
    Trial(prompts=3, chunk=7, before=50),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("trials") / "model", seed=5)


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    log = tmp_path_factory.mktemp("log") / "steps.jsonl"
    random = torch.get_rng_state()
    with closing(core_of(folder, measure_steps=True, step_log=str(log))) as core:
        assert torch.equal(torch.get_rng_state(), random)
        assert decode_step_log(log.read_bytes().splitlines())[1] == []
        yield core


@pytest.fixture
def plain(folder: Path) -> Iterator[EngineCore]:
    with closing(core_of(folder)) as core:
        yield core


def test_it_tells_what_its_steps_take(measured: EngineCore, plain: EngineCore) -> None:
    latency = measured.info.latency
    assert latency is not None
    assert measured.info.step_model is latency
    assert 0 < latency.decode_s(1, 100) < 10 * latency.prefill_s(400) < 100
    assert plain.info.step_model is None


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL, Role.DECODE])
def test_in_every_role_and_by_default(folder: Path, role: Role) -> None:
    arguments = NativeArguments(device="cpu", dtype="float32", threads=1, kv_blocks=64, context_length=256)
    with closing(load_core(EngineSpec(model=str(folder), role=role), arguments)) as core:
        assert (core.info.role, core.info.latency is not None) == (role, True)


def test_steps_are_measured_in_turn_with_others_on_the_same_cores(folder: Path) -> None:
    turns: list[tuple[str, object]] = []

    @contextmanager
    def turn(names: Sequence[str]) -> Iterator[None]:
        turns.append(("take", list(names)))
        yield
        turns.append(("leave", list(names)))

    checkpoint, arguments = (
        open_checkpoint(folder, 256),
        NativeArguments(device="cpu", threads=1, kv_blocks=64),
    )
    spec = EngineSpec(model=str(folder), role=Role.AGGREGATED)
    build_core(spec, "m", checkpoint, arguments, CoreHooks(turn=turn)).close()
    cores = [f"core-{core}" for core in usable_cores()]
    assert turns == [("take", cores), ("leave", cores)]
    assert cores


def test_real_steps_correct_the_times_that_prompts_are_cut_by(folder: Path) -> None:
    with closing(core_of(folder)) as core:
        core.scheduler.planner.pace = pace = StepPace(LatencyModel(base_s=10.0, prefill_token_s=10.0))
        answer(core, ask("long", (1,) * 100, 8))
        assert 0 < pace.model.base_s < 8.0, "steps take milliseconds"
        assert 0 < pace.model.prefill_token_s < 8.0


def test_nothing_is_left_behind(measured: EngineCore, plain: EngineCore) -> None:
    pool = measured.scheduler.pool
    assert_at_rest(measured)
    assert (len(pool._by_key), pool.num_free) == (0, measured.info.capacity.kv_total_blocks)
    assert measured.capabilities.kv_contents() == ()
    assert measured.scheduler.take_changes() == ()
    assert measured.step() is None
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        asked = ask(name, prompt, 8, seed=number, temperature=0.8, top_p=0.9)
        mine, others = answer(measured, asked), answer(plain, asked)
        assert (mine.tokens, mine.cached) == (others.tokens, others.cached)
    zeros = ask("zeros", (0,) * 64, 4)  # what trials compute
    assert answer(measured, zeros).cached == answer(plain, zeros).cached == 0


def test_it_says_so_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvolt.engines.native"):
        core_of(folder, measure_steps=True).close()
        core_of(folder).close()
    (line,) = [record.message for record in caplog.records if record.message.startswith("step")]
    assert line.startswith("steps calibrated: ")
    assert re.search(r" decode_error=\d+% prefill_error=\d+%$", line)


def test_steps_that_cannot_be_measured_keep_no_engine_from_starting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loading, "run_trials", fail)
    with closing(core_of(folder, measure_steps=True)) as core:
        assert core.info.latency is None
        assert_at_rest(core)
    assert "step calibration failed" in caplog.text


def test_an_engine_with_few_timed_steps_has_step_times_at_their_speed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(*given: object) -> Trials:
        return Trials(steps=(StepStats(1, 0, 0, 16, 2.5),), num_runs=1, elapsed_s=2.5, latency=None)

    monkeypatch.setattr(trial_runner, "measure_steps", measure)
    with closing(core_of(folder, measure_steps=True)) as core:
        assert core.info.latency is not None
        assert core.info.latency.decode_s(1, 16) == pytest.approx(2.5)
        assert core.info.has_estimated_latency
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the choice of a prefill worker may be wrong" in warning.getMessage()


def test_loading_logs_nothing_above_debug(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with closing(core_of(folder, measure_steps=False)):
        pass
    assert "loading" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_too_little_is_said_too() -> None:
    one = (StepStats(1, 0, 0, 16, 2.5),)
    few = Trials(steps=one, num_runs=1, elapsed_s=2.5, latency=None)
    assert trials_text(few) == (
        "step calibration incomplete: steps=1 time=2.5s; step times are estimated from these steps: predicted costs "
        "and the choice of a prefill worker may be wrong until requests correct them"
    )
    exact = LatencyModel(base_s=2.5)
    unjudged = Trials(steps=one, num_runs=1, elapsed_s=2.5, latency=exact)
    assert trials_text(unjudged).endswith("decode_error=unknown prefill_error=unknown")
    more = (StepStats(2, 0, 0, 32, 2.0), StepStats(3, 0, 0, 48, 2.0))
    judged = Trials(steps=one + more, num_runs=3, elapsed_s=6.5, latency=exact)
    assert trials_text(judged).endswith("decode_error=25% prefill_error=unknown")


def test_trials_write_to_blocks_of_their_own_and_other_ranks_hear_of_them(plain: EngineCore) -> None:
    seen: list[Batch] = []
    plain.runner.on_batch = seen.append
    runner = TrialRunner(plain.runner, 16)
    for trial in TRIALS:
        runner.prepare(trial)()
    for trial, batch in zip(TRIALS, seen, strict=True):
        stats = trial.stats()
        assert batch.num_decodes == stats.batch
        assert batch.num_tokens == stats.batch + stats.prefill_tokens
        assert len(set(batch.slots.tolist())) == batch.num_tokens
        assert sum(batch.context_lens[: batch.num_decodes]) == stats.context_tokens
        width = trial.num_blocks(16) // batch.num_sequences
        assert len({*batch.block_tables[:, :width].flatten().tolist()}) == trial.num_blocks(16)
        assert batch.block_tables.max() < plain.info.capacity.kv_total_blocks
    assert [batch.positions.tolist() for batch in seen] == [
        [15],
        [32] * 5,
        list(range(20)),
        [*range(50, 57)] * 3,
    ]


def test_decodes_are_replayed_where_those_of_requests_are(plain: EngineCore) -> None:
    replay = Replay(plain.runner.model.config.vocab_size)
    plain.runner.graphs = replay  # type: ignore[assignment]
    runner = TrialRunner(plain.runner, 16)
    for trial in TRIALS:
        runner.prepare(trial)()
    assert replay.sizes == [1, 5]


class Replay:
    def __init__(self, vocabulary: int) -> None:
        self.sizes: list[int] = []
        self._vocabulary = vocabulary

    def covers(self, batch: Batch) -> bool:
        return batch.num_decodes == batch.num_sequences

    def replay(self, batch: Batch) -> Any:
        self.sizes.append(batch.num_decodes)
        return torch.zeros(batch.num_decodes, self._vocabulary)
