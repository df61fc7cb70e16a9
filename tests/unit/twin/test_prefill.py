"""A twin with workers that compute prompts for the others: who computes what, and how long its KV is on its way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.unit.twin.test_replay import ENGINE, LINK_S, ONE, record, replay

from kvolt.bench.load.sample import Sample
from kvolt.bench.traces import small_trace
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Role
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.replay import TwinRun, new_tally

APART = replace(ONE, num_prefill=1, kv_link_s=0.0, kv_link_bytes_per_s=1e9)
KV_S = 6 * 16 * ENGINE.kv_bytes_per_token / 1e9
"""Of the six whole blocks of a prompt of 100 tokens."""


def moved_bytes(settings: TwinSettings, records: list) -> tuple[int, list[Sample]]:  # type: ignore[type-arg]
    run = TwinRun(settings, new_tally(settings))
    seen: list[int] = []
    samples: list[Sample] = []

    def look(sample: Sample) -> None:
        assert run.cluster is not None
        seen.append(run.cluster._board.num_bytes)
        samples.append(sample)

    run.run(records, look)
    return seen[-1], samples


def test_the_first_token_is_prefills_and_the_next_waits_for_its_kv() -> None:
    _, (sample,) = replay(APART, [record(0)])
    assert sample.error is None
    assert sample.output_tokens == 5
    assert sample.ttft_s == pytest.approx(2 * LINK_S + 0.01 + 0.1)
    # The KV comes, the four tokens of no whole block are computed again, then a step for each token.
    rest_s = 2 * LINK_S + KV_S + (0.01 + 4 * 0.001) + 3 * 0.01
    assert sample.e2e_s == pytest.approx(sample.ttft_s + rest_s, rel=0.02)


def test_only_what_decode_lacks_is_moved() -> None:
    block_bytes = 16 * ENGINE.kv_bytes_per_token
    once, _ = moved_bytes(APART, [record(0, hash_ids=(1,))])
    again, samples = moved_bytes(APART, [record(0, hash_ids=(1,)), record(9000, hash_ids=(1,))])
    assert once == again == 6 * block_bytes
    assert [sample.cached_tokens for sample in samples] == [0, 96]


@pytest.mark.parametrize("least", [0, 200])
def test_short_prompts_stay_where_they_are_answered(least: int) -> None:
    moved, (sample,) = moved_bytes(replace(APART, prefill_min_tokens=least), [record(0)])
    assert (moved == 0) is (least > 100)
    assert sample.error is None


def test_answers_are_not_held_up_by_prompts() -> None:
    """At equal workers: the longest pause within an answer is shorter where prompts are computed elsewhere."""
    slow = replace(ENGINE, latency=LatencyModel(base_s=0.005, prefill_token_s=0.001), max_batch_tokens=8192)
    together = TwinSettings(num_workers=4, engine=slow, router="latency")
    apart = replace(together, num_workers=2, num_prefill=2)
    (_, mixed), (_, separate) = (replay(each, list(small_trace())) for each in (together, apart))
    assert not [sample.error for sample in (*mixed, *separate) if sample.error]
    assert [sample.output_tokens for sample in mixed] == [sample.output_tokens for sample in separate]
    assert max(sample.max_gap_s for sample in separate) < 0.6 * max(sample.max_gap_s for sample in mixed)


def test_a_run_is_a_function_of_its_arguments() -> None:
    settings = replace(APART, num_workers=2, num_prefill=2, router="latency", seed=3)
    assert replay(settings, list(small_trace()))[1] == replay(settings, list(small_trace()))[1]


def test_a_prompt_whose_kv_came_is_not_computed_again_for_want_of_blocks() -> None:
    """One answer at a time, and little room besides it for the KV of those that wait: what others need meanwhile is
    taken from what nobody waits for."""
    scarce = replace(ENGINE, kv_blocks=28, max_num_seqs=1)
    settings = replace(APART, engine=scarce, prefill_choice="threshold")
    run = TwinRun(settings, new_tally(settings))
    computed: list[int] = []

    def look(sample: Sample) -> None:
        assert sample.error is None
        assert run.cluster is not None
        [decode] = [each for each in run.cluster._members if each.role is Role.DECODE]
        computed.append(decode.watch.prompt_tokens)

    run.run([record(200 * number, output=100, hash_ids=(number,)) for number in range(3)], look)
    assert computed == [5, 10, 15], "the four tokens of no whole block, and the first token of each"
