"""The twin: the figures of a trace follow from its settings, and from nothing else."""

from __future__ import annotations

import gc

import pytest
from msgspec.structs import replace

from kvolt.bench.load.sample import Sample
from kvolt.bench.load.sla import parse_sla
from kvolt.bench.load.tally import Tally
from kvolt.bench.traces import RECIPES, make_trace, small_trace
from kvolt.core.latency import LatencyModel
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.replay import TwinRun, new_tally, run_twin

STEP = LatencyModel(base_s=0.01, prefill_token_s=0.001)
LINK_S = 0.001
ENGINE = SimArguments(latency=STEP, block_size=16, max_batch_tokens=512)
ONE = TwinSettings(engine=ENGINE, link_s=LINK_S)


def record(at_ms: float, tokens: int = 100, output: int = 5, **more: object) -> TraceRecord:
    return TraceRecord(timestamp=at_ms, input_length=tokens, output_length=output, **more)  # type: ignore[arg-type]


def replay(
    settings: TwinSettings, records: list[TraceRecord], sla: str | None = None
) -> tuple[Tally, list[Sample]]:
    tally = new_tally(settings, parse_sla(sla) if sla else None)
    samples: list[Sample] = []
    run_twin(settings, records, tally, samples.append)
    return tally, sorted(samples, key=lambda sample: sample.number)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_run_leaves_the_garbage_collector_as_it_was(is_frozen: bool) -> None:
    (gc.freeze if is_frozen else gc.unfreeze)()
    try:
        replay(ONE, [record(0)])
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.freeze()


def test_one_request_takes_what_the_step_model_says() -> None:
    _, samples = replay(ONE, [record(0), record(500)])
    assert [sample.due_s for sample in samples] == [0.0, 0.5]
    for sample in samples:  # the first one too: connections are there before it comes
        assert sample.error is None
        assert (sample.output_tokens, sample.cached_tokens) == (5, 0)
        assert sample.ttft_s == pytest.approx(2 * LINK_S + 0.01 + 0.1)
        assert sample.tpot_s == pytest.approx(0.01)
        assert sample.e2e_s == pytest.approx(2 * LINK_S + 0.01 + 0.1 + 4 * 0.01)


def test_a_busy_worker_makes_others_wait_and_a_second_one_does_not() -> None:
    records = [record(at, tokens=500, hash_ids=(number,)) for number, at in enumerate((0, 0, 9000, 9000))]
    _, (*_, first, second) = replay(ONE, records)
    # The router holds the second until the first is computed.
    assert first.ttft_s == pytest.approx(0.51 + 2 * LINK_S)
    assert second.ttft_s == pytest.approx(0.51 + 0.51 + 2 * LINK_S)
    unpaced = replace(ONE, routing=RouterSettings(pace_prompts=False))
    _, (*_, first, second) = replay(unpaced, records)
    # A step of 512 tokens has room for twelve of the second; the next step computes the other 488.
    assert first.ttft_s == pytest.approx(0.522 + 2 * LINK_S)
    assert second.ttft_s == pytest.approx(0.522 + 0.498 + 2 * LINK_S)
    _, (*_, first, second) = replay(replace(ONE, num_workers=2), records)
    assert first.ttft_s == second.ttft_s == pytest.approx(0.51 + 2 * LINK_S)


def test_a_prefix_that_was_there_is_found() -> None:
    first = record(0, tokens=1024, hash_ids=(1, 2))
    tally, samples = replay(
        ONE, [first, record(60_000, tokens=1024, hash_ids=(1, 3)), replace(first, timestamp=90_000)]
    )
    # The last token is always computed, so the last block of a prompt that is here is not used.
    assert [sample.cached_tokens for sample in samples] == [0, 512, 1008]
    assert tally.cached_tokens == 1520


def test_the_next_turn_comes_after_the_answer() -> None:
    turns = [record(0, session="a", output=50), record(1, session="a", delay=2000.0), record(1)]
    _, (first, second, other) = replay(ONE, turns)
    assert second.due_s == pytest.approx(first.end_s + 2.0)
    assert (first.turn, second.turn) == (0, 1)
    assert other.due_s == pytest.approx(0.001)


def test_what_cannot_be_served_is_counted() -> None:
    settings = replace(ONE, engine=replace(ENGINE, context_length=200))
    tally, (good, bad) = replay(settings, [record(0), record(0, tokens=300)], "ttft=1ms")
    assert good.error is None
    assert bad.error == "invalid_request"
    assert (tally.num_complete, tally.num_failed, tally.num_good) == (1, 1, 0)


def test_a_run_is_a_function_of_its_arguments() -> None:
    records = list(small_trace())[:80]
    settings = replace(ONE, num_workers=3, engine=replace(ENGINE, kv_blocks=400, context_length=4096))
    (once, first), (again, second) = replay(settings, records), replay(settings, records)
    assert first == second
    assert once.histograms() == again.histograms()
    assert once.num_complete == len(records)
    _, other = replay(replace(settings, num_workers=2), records)
    assert other != first


@pytest.mark.parametrize(("kv_blocks", "max_num_seqs"), [(4000, 64), (220, 64), (400, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_merged_steps_give_the_figures_of_single_ones(seed: int, kv_blocks: int, max_num_seqs: int) -> None:
    """With room for all, with too few blocks (some are preempted), and with a queue."""
    records = list(make_trace(replace(RECIPES["small"], requests=60, seed=seed)))
    model = replace(STEP, context_token_s=1e-5, batch_s=1e-3)
    engine = replace(
        ENGINE, latency=model, kv_blocks=kv_blocks, max_num_seqs=max_num_seqs, context_length=3000
    )
    merged = TwinSettings(num_workers=2, router="round-robin", engine=engine, link_s=LINK_S)
    (_, quick), (_, slow) = replay(merged, records), replay(replace(merged, merge_steps=False), records)
    assert len(quick) == len(slow) == len(records)
    for one, other in zip(quick, slow, strict=True):
        assert one.error == other.error
        assert (one.output_tokens, one.cached_tokens) == (other.output_tokens, other.cached_tokens)
        for name in ("first_s", "last_s", "end_s"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-6), (one.number, name)
        # In a run of steps gaps are told as equal, where each is longer than the one before by what contexts grow.
        assert one.second_s == pytest.approx(other.second_s, abs=1e-3)


@pytest.mark.parametrize(
    ("router", "is_told"), [("round-robin", False), ("least-loaded", False), ("latency", True)]
)
def test_workers_tell_of_their_blocks_where_the_router_reads_it(router: str, is_told: bool) -> None:
    settings = replace(ONE, router=router)
    run = TwinRun(settings, new_tally(settings))
    told: list[int] = []

    def look(sample: Sample) -> None:
        assert run.cluster is not None
        (member,) = run.cluster._members
        assert member.worker.journal is not None
        told.append(member.worker.journal.next_id)

    run.run([record(0, hash_ids=(1,)), record(900, hash_ids=(1,))], look)
    assert len(told) == 2
    assert any(told) is is_told


def shared_prefix_trace(
    prefix: int, num: int, gap_ms: float, tail: int = 256, output: int = 128
) -> list[TraceRecord]:
    """Prompts that begin with the same `prefix` tokens, at even intervals."""
    blocks = tuple(range(prefix // 64))
    return [
        record(
            gap_ms * number,
            tokens=prefix + tail,
            output=output,
            hash_ids=(*blocks, *range(10_000 + 4 * number, 10_000 + 4 * number + 4)),
            block_size=64,
        )
        for number in range(num)
    ]


@pytest.mark.parametrize(("shared_kv_read", "step_tokens"), [(0.0, 16_000 + 8 * 320), (1.0, 8 * 16_320)])
def test_a_shared_prefix_is_read_as_often_as_the_preset_says(shared_kv_read: float, step_tokens: int) -> None:
    model = LatencyModel(base_s=0.001, context_token_s=1e-7, shared_kv_read=shared_kv_read)
    engine = SimArguments(latency=model, block_size=64, kv_blocks=16_384, context_length=65_536)
    warm, *batch = shared_prefix_trace(16_000, 9, 0.0)
    _, (_, *samples) = replay(
        TwinSettings(engine=engine, link_s=LINK_S), [warm, *(replace(one, timestamp=5000.0) for one in batch)]
    )
    for sample in samples:  # in the middle of its answer each has 64 tokens of it
        assert sample.tpot_s == pytest.approx(0.001 + 1e-7 * step_tokens, rel=0.01)


def test_a_shared_prefix_takes_as_long_as_in_dynamos_replay() -> None:
    """E2E mean 1,026 ms in Dynamo 1.4.2's offline replay of this trace, round-robin over 8 workers."""
    engine = SimArguments(preset="dynamo-mocker", block_size=64, kv_blocks=16_384, context_length=65_536)
    settings = TwinSettings(engine=engine, num_workers=8, router="round-robin")
    _, samples = replay(settings, shared_prefix_trace(16_000, 300, 1000 / 60))
    assert sum(sample.e2e_s or 0.0 for sample in samples) / 300 == pytest.approx(1.026, rel=0.05)


@pytest.mark.parametrize("preset", ["h200-llama-8b", "mid-gpu-8b"])
def test_a_shared_prefix_is_spread_by_the_default_router(preset: str) -> None:
    engine = SimArguments(preset=preset, block_size=64, kv_blocks=16_384, context_length=65_536)
    # Of each router the mean of TTFT and of E2E, once every worker has had time to get its copy.
    means = {}
    for router in ("latency", "classic", "round-robin"):
        settings = TwinSettings(engine=engine, num_workers=8, router=router)
        _, samples = replay(settings, shared_prefix_trace(4032, 320, 25.0))
        warm = samples[80:]
        assert all(sample.error is None for sample in warm)
        means[router] = [
            sum(time_s or 0.0 for time_s in times_s) / len(warm)
            for times_s in zip(*((sample.ttft_s, sample.e2e_s) for sample in warm), strict=True)
        ]
    for mine, *others in zip(*means.values(), strict=True):
        assert mine <= 1.02 * min(others)
