"""What a twin sees inside its engines, against what must have happened there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvolt.bench.load.report import RunFacts
from kvolt.bench.load.sla import parse_sla
from kvolt.bench.traces import RECIPES, make_trace, small_trace
from kvolt.core.latency import LatencyModel
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.misses import Reason
from kvolt.twin.replay import TwinRun, new_tally
from kvolt.twin.report import TwinReport, make_twin_report

STEP = LatencyModel(base_s=0.01, prefill_token_s=0.001)
ENGINE = SimArguments(latency=STEP, block_size=16, max_batch_tokens=512)
ONE = TwinSettings(engine=ENGINE, link_s=0.001)
FACTS = RunFacts(url="twin", model="m", started_at=0.0, settings={}, is_interrupted=False, open_loop=True)


def record(at_ms: float, tokens: int = 100, output: int = 5, **more: object) -> TraceRecord:
    return TraceRecord(timestamp=at_ms, input_length=tokens, output_length=output, **more)  # type: ignore[arg-type]


def reported(settings: TwinSettings, records: list[TraceRecord], sla: str | None = None) -> TwinReport:
    run = TwinRun(settings, new_tally(settings, parse_sla(sla) if sla else None))
    run.run(records)
    assert run.watch.visits == {}  # nothing is kept of what is over
    return make_twin_report(FACTS, run)


def chief(report: TwinReport) -> dict[Reason, int]:
    return report.twin.misses.reasons


def test_gpu_seconds_are_of_all_workers_and_busy_ones_of_their_steps() -> None:
    settings = replace(ONE, num_workers=2, gpus_per_worker=4)
    twin = reported(settings, [record(0), record(1000)]).twin
    busy_s = 2 * (0.11 + 4 * 0.01)
    end_s = 1.0 + 0.002 + 0.15
    assert twin.gpu_seconds == pytest.approx(2 * 4 * end_s)
    assert twin.busy_gpu_seconds == pytest.approx(4 * busy_s)
    assert twin.busy_share == pytest.approx(busy_s / (2 * end_s))
    assert [(worker.requests, worker.prompt_tokens) for worker in twin.workers] == [(1, 100), (1, 100)]
    assert [worker.busy_s for worker in twin.workers] == pytest.approx([busy_s / 2, busy_s / 2])


def test_use_over_time_adds_up() -> None:
    records = list(make_trace(replace(RECIPES["small"], requests=80, seed=1)))
    engine = replace(ENGINE, kv_blocks=300, context_length=3000, max_num_seqs=4)
    for merge_steps in (True, False):
        settings = TwinSettings(num_workers=2, engine=engine, merge_steps=merge_steps)
        report = reported(settings, records)
        line = report.twin.activity
        end_s = report.twin.gpu_seconds / 2
        lengths = [min(line.width_s, end_s - at * line.width_s) for at in range(len(line.busy))]
        busy_s = 2 * sum(share * length for share, length in zip(line.busy, lengths, strict=True))
        assert busy_s == pytest.approx(report.twin.busy_gpu_seconds, rel=1e-3)
        assert 0 < max(line.busy) <= 1.0 + 1e-6
        assert 0 < max(line.kv_used) <= 1.0
        assert max(line.running) <= 8
        assert max(line.waiting) > 0


def test_merged_steps_show_the_use_of_single_ones() -> None:
    records = list(make_trace(replace(RECIPES["small"], requests=60, seed=2)))
    engine = replace(ENGINE, kv_blocks=2000, context_length=3000, max_num_seqs=8)
    merged = TwinSettings(num_workers=2, engine=engine)
    quick = reported(merged, records, "ttft=1s").twin
    slow = reported(replace(merged, merge_steps=False), records, "ttft=1s").twin
    assert quick.busy_gpu_seconds == pytest.approx(slow.busy_gpu_seconds)
    assert quick.misses.reasons == slow.misses.reasons
    for name in ("busy", "running", "waiting"):
        mine, theirs = getattr(quick.activity, name), getattr(slow.activity, name)
        assert sum(mine) == pytest.approx(sum(theirs), rel=0.02, abs=0.5)


def test_what_the_cache_found_is_the_device_tiers() -> None:
    first = record(0, tokens=1024, hash_ids=(1, 2))
    twin = reported(ONE, [first, replace(first, timestamp=60_000)]).twin
    assert list(twin.hits) == ["device"]
    assert twin.hits["device"].tokens == 1008
    assert twin.hits["device"].share == pytest.approx(1008 / 2048)


def test_a_report_is_a_function_of_its_arguments() -> None:
    records = list(small_trace())[:60]
    engine = replace(ENGINE, kv_blocks=400, context_length=4096)
    settings = TwinSettings(num_workers=3, engine=engine, router="least-loaded")
    once, again = (reported(settings, records, "ttft=100ms,itl=15ms") for _ in range(2))
    assert once == again
    assert reported(replace(settings, router="round-robin"), records) != once


# --- why requests missed


def test_who_waited_for_a_place() -> None:
    engine = replace(ENGINE, max_num_seqs=1)
    records = [record(0, output=100), record(0)]
    report = reported(replace(ONE, engine=engine), records, "ttft=500ms")
    assert chief(report) == {Reason.QUEUED: 1}
    [miss] = report.twin.misses.worst
    assert (miss.number, miss.figure, miss.worker) == (1, "ttft", "w0")
    assert miss.parts[Reason.QUEUED] == pytest.approx(0.11 + 99 * 0.01 + 0.001, abs=0.01)
    assert miss.value_s == pytest.approx(sum(miss.parts.values()) - miss.parts[Reason.DECODE], abs=0.01)


def test_whose_own_prompt_was_long() -> None:
    report = reported(ONE, [record(0, tokens=1000)], "ttft=500ms")
    assert chief(report) == {Reason.PROMPT: 1}
    [miss] = report.twin.misses.worst
    assert miss.parts[Reason.PROMPT] == pytest.approx(1.02)  # two chunks
    assert (miss.input_tokens, miss.cached_tokens) == (1000, 0)


def test_whose_gaps_the_prompts_of_others_stretched() -> None:
    records = [record(0, tokens=10, output=20), record(100, tokens=400), record(150, tokens=400)]
    report = reported(ONE, records, "itl=30ms")
    by_number = {miss.number: miss for miss in report.twin.misses.worst}
    assert by_number[0].reason == Reason.OTHERS
    assert by_number[0].parts[Reason.OTHERS] == pytest.approx(0.8, abs=0.01)  # the time of 800 tokens
    for figure in ("max_gap", "ttst"):
        second = [record(0, tokens=10, output=20), record(1, tokens=400, output=1)]
        report = reported(ONE, second, f"{figure}=30ms")
        assert chief(report) == {Reason.OTHERS: 1}


def test_whose_prompt_shared_its_steps_with_longer_ones() -> None:
    records = [record(0, tokens=480), record(0, tokens=8)]  # in one step
    report = reported(ONE, records, "ttft=100ms")
    by_number = {miss.number: miss.reason for miss in report.twin.misses.worst}
    assert by_number == {0: Reason.PROMPT, 1: Reason.OTHERS}


def test_who_lost_its_blocks() -> None:
    # Each grows to eight blocks, and there are twelve: the second yields and is computed again at the end.
    engine = replace(ENGINE, kv_blocks=12, max_num_seqs=4)
    records = [record(0, tokens=64, output=64), record(0, tokens=64, output=64)]
    report = reported(replace(ONE, engine=engine), records, "max_gap=200ms")
    assert report.twin.preemptions == 1
    assert chief(report) == {Reason.PREEMPTED: 1}
    [miss] = report.twin.misses.worst
    assert (miss.number, miss.preemptions) == (1, 1)
    assert miss.parts[Reason.PREEMPTED] > 0.2


def test_who_lost_its_blocks_before_it_had_a_token() -> None:
    # The second's prompt comes in chunks of a token beside the first one's answer, which then wants its blocks.
    engine = replace(ENGINE, kv_blocks=12, max_num_seqs=2, max_batch_tokens=2)
    records = [record(0, tokens=16, output=150), record(0, tokens=100, output=2)]
    report = reported(replace(ONE, engine=engine), records, "ttft=600ms")
    by_number = {miss.number: miss for miss in report.twin.misses.worst}
    assert by_number[1].preemptions >= 1
    assert by_number[1].parts[Reason.PREEMPTED] > 0


def test_whose_decoding_itself_was_slow() -> None:
    report = reported(ONE, [record(0, output=50)], "tpot=5ms,e2e=10s")
    assert chief(report) == {Reason.DECODE: 1}
    report = reported(ONE, [record(0, output=200)], "e2e=1s")
    assert chief(report) == {Reason.DECODE: 1}


def test_what_failed_missed_with_or_without_limits() -> None:
    settings = replace(ONE, engine=replace(ENGINE, context_length=200))
    records = [record(0), record(0, tokens=300)]
    for sla in (None, "ttft=10s"):
        report = reported(settings, records, sla)
        assert chief(report) == {Reason.FAILED: 1}
        assert report.twin.misses.missed == 1
        assert report.twin.misses.worst == []


def test_a_limit_of_nothing_is_missed_by_all() -> None:
    assert chief(reported(ONE, [record(0)], "ttft=0s")) == {Reason.PROMPT: 1}


def test_only_the_worst_are_kept() -> None:
    records = [record(at * 3000, tokens=100 + at) for at in range(30)]
    report = reported(ONE, records, "ttft=50ms")
    misses = report.twin.misses
    assert misses.missed == 30
    assert [miss.number for miss in misses.worst] == list(range(29, 9, -1))


def test_ended_before_its_time_it_counts_what_was_under_way() -> None:
    records = [record(at * 10, output=50) for at in range(100)]
    run = TwinRun(ONE, new_tally(ONE, parse_sla("ttft=1ms")))
    run.run(records, lambda sample: run.end() if run.tally.num_complete == 3 else None)
    assert run.is_interrupted
    assert 3 <= run.tally.num_complete < 20  # some end with the third
    assert run.tally.num_interrupted > 0
    report = make_twin_report(replace(FACTS, is_interrupted=True), run)
    assert report.counts.interrupted == run.tally.num_interrupted
    assert report.twin.gpu_seconds == pytest.approx(run.tally.last_end_s)
    assert report.twin.misses.missed == run.tally.num_complete
    run.end()  # when all is over it changes nothing


def test_ended_before_it_began_it_runs_nothing() -> None:
    run = TwinRun(ONE, new_tally(ONE))
    run.end()
    run.run([record(0)])
    assert run.tally.num_ended == 0
    report = make_twin_report(FACTS, run)
    assert (report.twin.gpu_seconds, report.twin.busy_share, report.twin.activity.busy) == (0.0, 0.0, [])


def test_a_broken_trace_ends_the_run_with_its_error() -> None:
    def broken() -> object:
        yield record(0, output=500)
        raise ValueError("line 2")

    run = TwinRun(ONE, new_tally(ONE))
    with pytest.raises(ValueError, match="line 2"):
        run.run(broken())  # type: ignore[arg-type]


# --- routing


def test_least_loaded_goes_round_a_busy_worker() -> None:
    # The first is long. In turn every second request waits behind it; by load none does.
    records = [record(0, output=2000)] + [record(100 + at * 400) for at in range(10)]
    settings = replace(ONE, num_workers=2, engine=replace(ENGINE, max_num_seqs=1))
    in_turn = reported(replace(settings, router="round-robin"), records, "ttft=1s")
    by_load = reported(replace(settings, router="least-loaded"), records, "ttft=1s")
    assert chief(in_turn) == {Reason.QUEUED: 5}
    assert chief(by_load) == {}
    assert sorted(worker.requests for worker in by_load.twin.workers) == [1, 10]


def test_an_unknown_router_is_told() -> None:
    with pytest.raises(ValueError, match="known: latency, classic"):
        TwinSettings(router="nobody")
