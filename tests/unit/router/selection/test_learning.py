"""Outcomes change later decisions: slow workers get fewer requests, long answers count more."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.unit.engines.lab import ARGUMENTS, Lab, make_request, sim, until
from tests.unit.router.test_event_fed_router import BLOCK, Reader, prompt

from kvolt.core.delta import Usage
from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Handoff, Request
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.router.choice import WorkerChoice
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.policy.output_lengths import FIRST_GUESS
from kvolt.router.policy.policy import latency
from kvolt.router.port import RouterContext
from kvolt.router.selection.learning import OutcomeTracker
from kvolt.router.worker_rank import WorkerDpRank
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual

TOKEN_S = 0.0005
TOLD = msgspec.structs.replace(
    ARGUMENTS,
    latency=LatencyModel(base_s=0.005, prefill_token_s=TOKEN_S),
    context_length=4096,
    max_batch_tokens=2048,
)
"""A prompt of 400 tokens takes a fifth of a second."""


async def requests_by_worker(speeds: list[float], correct_times: bool) -> tuple[Counter[str], EventFedRouter]:
    """Where prompts with nothing in common go, sent at six tenths of what workers could take if all were as they say;
    of the second half."""
    async with Lab() as lab:
        workers = [
            await lab.worker(f"w{number}", sim(msgspec.structs.replace(TOLD, slow_by=1 / speed)))
            for number, speed in enumerate(speeds)
        ]
        runtime = await lab.runtime("edge")
        client = await runtime.client(workers[0].endpoint)
        await until(lambda: len(client.candidates()) == len(workers))
        settings = RouterSettings(correct_times=correct_times)
        router = EventFedRouter(RouterContext(client, runtime, BLOCK, settings), latency())
        task_group = TaskGroup("journeys")
        journey_context = JourneyContext(router, client, task_group)
        rng, readers, where = random.Random(4), [], Counter[str]()
        for number in range(240):
            tokens = tuple(rng.randrange(3, 200) for _ in range(400))
            reader = Reader()
            journey = Journey(journey_context, prompt(f"r{number}", tokens), reader, Deadlines())
            await journey.start()
            readers.append(reader)
            assert journey.decision is not None
            if number >= 120:
                where[journey.decision.instance.process] += 1
            await asyncio.sleep(rng.expovariate(0.6 * len(workers) / (400 * TOKEN_S)))
        await until(lambda: all(reader.is_over for reader in readers), 600.0)
        assert router.num_in_flight == 0
        await task_group.close()
        await router.close()
        return where, router


def test_a_worker_three_times_slower_than_its_model_gets_fewer_requests() -> None:
    async def scenario() -> None:
        told, _ = await requests_by_worker([1.0, 1.0, 1 / 3], correct_times=False)
        seen, router = await requests_by_worker([1.0, 1.0, 1 / 3], correct_times=True)
        assert seen["w2"] < 0.25 * 120, "it could take a seventh of what there is"
        assert seen["w2"] < told["w2"]
        pace = [each.pace for each in router.explain(prompt("x", tuple(range(40))))]
        assert sorted(pace)[-1] > 2.0
        assert sorted(pace)[0] < 1.5

    run_virtual(scenario)


def test_workers_that_match_their_models_share_equally() -> None:
    async def scenario() -> None:
        seen, _ = await requests_by_worker([1.0, 1.0, 1.0], correct_times=True)
        assert min(seen.values()) > 0.25 * 120

    run_virtual(scenario)


# --- by hand


def choice(request: Request, **changes: Any) -> WorkerChoice:
    fields: dict[str, Any] = {
        "worker_rank": WorkerDpRank(InstanceId("w"), 0),
        "overlap_blocks": 0,
        "queue_s": 0.0,
        "prefill_s": 1.0,
        "is_saturated": False,
        "request": request,
        "prefill_tokens": request.num_prompt_tokens,
        "blocks": 1.0,
        "model_prefill_s": 1.0,
    }
    return WorkerChoice(**fields | changes)


ASKED = msgspec.structs.replace(
    make_request(prompt=100, tokens=4000),
    block_size=BLOCK,
    sequence_hashes=tuple(map(SequenceHash, range(6))),
)


def pace(learning: OutcomeTracker, now: float) -> float:
    return float(learning.pace(np.array([0], dtype=np.intp), now)[0])


def test_answers_teach_how_long_they_get() -> None:
    learning = OutcomeTracker()
    for ticket in range(100):
        learning.on_reserved(ticket, choice(ASKED), 0, 0.0, 0.0)
        learning.on_released(ticket, Usage(completion_tokens=30) if ticket % 2 else None)
    assert learning.output_tokens(ASKED) == pytest.approx(30, abs=5)
    assert learning.stats.num_ended == 100
    assert learning.stats.output_tokens.num_observed == 50
    learning.on_released(5, Usage(completion_tokens=9999))
    assert learning.stats.num_ended == 100, "each once"


def test_a_long_answer_is_beside_others_for_as_long_as_they_last() -> None:
    learning = OutcomeTracker()
    assert learning.shared_steps(10.0) == 10.0
    assert learning.shared_steps(10_000.0) == FIRST_GUESS


def test_prompts_of_others_in_between_are_not_the_workers_slowness() -> None:
    """Each second of ours has three of others' beside it, and the router knows of them."""
    learning, alone = OutcomeTracker(), OutcomeTracker()
    for number in range(100):
        now = 4.0 * number
        for each, queue_s in ((learning, 3.0), (alone, 0.0)):
            each.on_reserved(number, choice(ASKED, queue_s=queue_s), 0, 0.0, now)
            each.on_first_token(number, None, now + 4.0)
            each.on_released(number, None)
    assert pace(learning, 400.0) == pytest.approx(1.0, rel=0.05)
    assert pace(alone, 400.0) == pytest.approx(4.0, rel=0.3)


def test_a_miss_is_not_the_workers_slowness_either() -> None:
    """A tenth was to be computed, and all of it was."""
    learning = OutcomeTracker()
    for number in range(100):
        now = 10.0 * number
        learning.on_reserved(number, choice(ASKED, prefill_tokens=10, model_prefill_s=0.1), 0, 0.0, now)
        learning.on_first_token(number, 0, now + 1.0)
        learning.on_released(number, None)
    assert pace(learning, 1000.0) == pytest.approx(1.0, rel=0.05)


def test_time_correction_can_be_disabled() -> None:
    learning = OutcomeTracker(corrects_times=False)
    learning.add_row(0)
    for number in range(50):
        learning.on_reserved(number, choice(ASKED), 0, 0.0, 0.0)
        learning.on_first_token(number, None, 100.0)
    assert pace(learning, 100.0) == 1.0
    learning.drop_row(0)


def test_predicted_and_measured_values_are_counted() -> None:
    learning = OutcomeTracker()
    learning.on_reserved(1, choice(ASKED, overlap_blocks=3, max_overlap_blocks=5, queue_s=1.0), 0, 0.0, 10.0)
    learning.on_first_token(1, 4 * BLOCK, 14.0)
    stats = learning.stats
    assert (stats.num_started, stats.num_non_max_overlap) == (1, 1)
    assert stats.hit_rate.total == pytest.approx(3 / 7)
    assert stats.reported_hit_rate.total == pytest.approx(4 * BLOCK / 100)
    assert stats.overlap_lost.total == 2
    assert (stats.ttft_s.total, stats.predicted_ttft_s.total) == (4.0, 2.0)
    assert stats.ttft_ratio.total == 2.0
    stats.record_overhead(0.00001, 0.00005)
    assert stats.scheduling_ms.total == pytest.approx(0.04)


def test_a_transferred_prompt_does_not_change_the_pace() -> None:
    """Its first token waits for KV that is on its way: a slow network is not a slow worker."""
    handed = msgspec.structs.replace(ASKED, handoff=Handoff(ticket=b"", prefill_instance=InstanceId("p")))
    learning = OutcomeTracker()
    for number in range(100):
        now = 10.0 * number
        learning.on_reserved(number, choice(handed), 0, 0.0, now)
        learning.on_first_token(number, None, now + 9.0)
        learning.on_released(number, None)
    assert pace(learning, 1000.0) == 1.0
    assert learning.stats.num_started == 100, "it is counted all the same"
