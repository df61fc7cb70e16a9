"""What a prompt takes at each worker: by the model that it registered, in its own chunks; a guess where it has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.ids import CardHash
from kvolt.core.latency import LatencyModel, OccupancyModel
from kvolt.core.load import StepStats
from kvolt.core.request import Role
from kvolt.router.roster import Prices


def info(chunk: int = 100, **models: Any) -> EngineInfo:
    return EngineInfo(
        engine="sim",
        role=Role.AGGREGATED,
        model="m",
        card=CardHash("c"),
        block_size=16,
        capacity=Capacity(max_num_seqs=8, max_batch_tokens=chunk, kv_total_blocks=50),
        **models,
    )


LINEAR = LatencyModel(base_s=1.0, prefill_token_s=0.1, batch_s=0.5, context_token_s=0.01)


def test_each_worker_by_its_own_model_and_chunks() -> None:
    made = Prices([info(latency=LINEAR), info(chunk=50, latency=LINEAR), None])
    times = made.prefill_s(100, np.array([100.0, 100.0, 100.0]))
    assert times.tolist() == pytest.approx([11.0, 12.0, 100 * 50e-6])
    assert made.total_blocks.tolist() == [50, 50, 0]


def test_what_is_held_takes_no_time() -> None:
    made = Prices([info(latency=LINEAR), info(latency=LINEAR)])
    assert made.prefill_s(100, np.array([100.0, 20.0])).tolist() == pytest.approx([11.0, 3.0])


def test_one_more_slows_down_those_who_decode() -> None:
    occupancy = OccupancyModel(decode_base_s=0.1, decode_share_s=1.0, kv_tokens=1000)
    made = Prices([info(latency=LINEAR), info(occupancy_latency=occupancy), info(latency=LINEAR), None])
    decoding, context = np.array([2.0, 2.0, 0.0, 3.0]), np.array([200.0, 200.0, 0.0, 10.0])
    times = made.slowdown_s(100, 10.0, decoding, context)
    assert times.tolist() == pytest.approx([10 * (0.5 + 1.0), 10 * 0.1, 0.0, 0.0])


def test_a_worker_with_tiny_steps_costs_us_little() -> None:
    calls: list[StepStats] = []

    class Counted(LatencyModel, frozen=True):
        def step_s(self, step: StepStats) -> float:
            calls.append(step)
            return 1.0

    made = Prices([info(chunk=1, latency=Counted())])
    made.prefill_s(1_000_000, np.array([1_000_000.0]))
    assert len(calls) <= 64
    assert sum(step.prefill_tokens for step in calls) == 1_000_000
