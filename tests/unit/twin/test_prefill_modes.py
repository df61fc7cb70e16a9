"""A twin whose prefill workers are asked only where that is better: under which load each way is taken."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from kvolt.bench.load.sample import Sample
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.journey.prefill_mode import PrefillMode, PrefillModeSelector
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.replay import TwinRun, new_tally

SETTINGS = TwinSettings(
    num_workers=1,
    num_prefill=1,
    engine=SimArguments(preset="h200-llama-8b", block_size=64, kv_blocks=8192),
)


def arrivals(rate_per_s: float, prompt: int, answer: int, num: int = 60) -> list[TraceRecord]:
    """By chance, with nothing in common."""
    rng, now_s, records = random.Random(7), 0.0, []
    for number in range(num):
        now_s += rng.expovariate(rate_per_s)
        hashes = tuple(range(1000 * number, 1000 * number + prompt // 64))
        records.append(
            TraceRecord(
                timestamp=1e3 * now_s,
                input_length=prompt,
                output_length=answer,
                hash_ids=hashes,
                block_size=64,
            )
        )
    return records


def ways_taken(settings: TwinSettings, records: list[TraceRecord]) -> Counter[PrefillMode]:
    run = TwinRun(settings, new_tally(settings))
    counts: Counter[PrefillMode] = Counter()
    errors = []

    def look(sample: Sample) -> None:
        assert run.cluster is not None
        prefill_modes = run.cluster.journey_context.prefill_modes
        assert isinstance(prefill_modes, PrefillModeSelector)
        counts.clear()
        counts.update(prefill_modes.counts)
        errors.append(sample.error)

    run.run(records, look)
    assert errors == [None] * len(records)
    return +counts


CALM = arrivals(2.0, 1024, 50)
LONG_PROMPTS = arrivals(20.0, 4096, 20)
LONG_ANSWERS = arrivals(60.0, 128, 400)
MANY_ANSWERS = arrivals(200.0, 128, 400, num=240)


def test_at_little_load_prompts_are_computed_apart() -> None:
    assert ways_taken(replace(SETTINGS, target_ttft_s=0.5, target_itl_s=0.02), CALM) == {
        PrefillMode.REMOTE: 60
    }


def test_with_more_prompts_than_prefill_workers_can_compute_some_are_computed_here() -> None:
    taken = ways_taken(SETTINGS, LONG_PROMPTS)
    assert taken[PrefillMode.LOCAL] > 10
    assert taken[PrefillMode.REMOTE] > 10


def test_with_more_answers_than_decode_workers_can_give_some_are_given_there() -> None:
    assert ways_taken(SETTINGS, LONG_ANSWERS)[PrefillMode.PREFILL_WORKER] > 10


@pytest.mark.parametrize("records", [LONG_PROMPTS, MANY_ANSWERS], ids=["prompts", "answers"])
def test_a_promise_is_what_moves_them(records: list[TraceRecord]) -> None:
    """Prompts are computed apart as long as nothing is broken by it."""
    easy = replace(SETTINGS, target_ttft_s=60.0, target_itl_s=1.0)
    assert ways_taken(easy, records) == {PrefillMode.REMOTE: len(records)}
    hard = replace(SETTINGS, target_ttft_s=0.2, target_itl_s=0.01)
    assert ways_taken(hard, records)[PrefillMode.REMOTE] < len(records) / 2


@pytest.mark.parametrize("records", [LONG_PROMPTS, LONG_ANSWERS], ids=["prompts", "answers"])
def test_the_threshold_knows_one_way(records: list[TraceRecord]) -> None:
    assert ways_taken(replace(SETTINGS, prefill_choice="threshold"), records) == {PrefillMode.REMOTE: 60}
    short = replace(SETTINGS, prefill_choice="threshold", prefill_min_tokens=10_000)
    assert ways_taken(short, records) == {PrefillMode.LOCAL: 60}


# --- links between racks

RACKS = replace(
    SETTINGS,
    num_workers=4,
    num_prefill=2,
    num_racks=2,
    prefill_choice="threshold",
    rack_link_bytes_per_s=2e8,
)
APART = arrivals(1.0, 4096, 20)


def second_tokens_s(settings: TwinSettings) -> list[float]:
    """From the first token, which the prefill worker gives, to the second: the time of the KV on its way."""
    waits: list[float] = []
    run = TwinRun(settings, new_tally(settings))
    run.run(APART, lambda sample: waits.append(sample.ttst_s or 0.0))
    return waits


def test_kv_between_racks_takes_longer() -> None:
    far = second_tokens_s(replace(RACKS, router="round-robin"))
    near = second_tokens_s(replace(RACKS, router="round-robin", num_racks=1))
    assert sum(far) > 10 * sum(near)


def test_answers_come_from_the_rack_of_their_prompt_once_links_are_measured() -> None:
    waits = second_tokens_s(RACKS)
    assert max(waits[:20]) > 1.0, "a slow link was tried"
    assert sum(wait > 1.0 for wait in waits[20:]) <= 4, "and hardly any more"
