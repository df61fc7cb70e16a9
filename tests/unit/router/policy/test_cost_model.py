"""CostModel: registered models, chunks of each worker, the default model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.ids import CardHash
from kvolt.core.latency import LatencyModel, OccupancyModel, prompt_s
from kvolt.core.request import Role
from kvolt.router.policy import cost_model as cost_model_module
from kvolt.router.policy.cost_model import CostInputs, CostModel


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


def nobody(num_workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Who decodes, and with how much context."""
    return np.zeros(num_workers), np.zeros(num_workers)


LINEAR = LatencyModel(base_s=1.0, prefill_token_s=0.1, batch_s=0.5, context_token_s=0.01)


def test_each_worker_by_its_own_model_and_chunks() -> None:
    made = CostModel([info(latency=LINEAR), info(chunk=50, latency=LINEAR), None])
    times = made.prefill_s(100, np.array([100.0, 100.0, 100.0]), *nobody(3))
    assert times.tolist() == pytest.approx([11.0, 12.0, 6e-3 + 100 * 50e-6])


def test_cached_blocks_take_no_time() -> None:
    made = CostModel([info(latency=LINEAR), info(latency=LINEAR)])
    assert made.prefill_s(100, np.array([100.0, 20.0]), *nobody(2)).tolist() == pytest.approx([11.0, 3.0])


def test_decoding_requests_are_in_every_prefill_step() -> None:
    occupancy = OccupancyModel(prefill_token_s=0.1, decode_base_s=0.5, decode_share_s=1.0, kv_tokens=1000)
    made = CostModel([info(latency=LINEAR), info(latency=LINEAR), info(occupancy_latency=occupancy)] * 2)
    decoding, context = np.array([2.0, 0.0, 2.0, 2.0, 0.0, 0.0]), np.array([200.0, 0.0, 200.0] * 2)
    times = made.prefill_s(250, np.array([250.0] * 3 + [50.0] * 3), decoding, context)
    beside = 2 * 0.5 + 200 * 0.01
    assert times.tolist() == pytest.approx(
        [
            3 * 1.0 + 25.0 + 2.5 * beside,
            3 * 1.0 + 25.0,
            25.0 + 2.5 * (0.5 + 0.2),
            1.0 + 5.0 + 0.5 * beside,  # the other half of the step is another prompt's
            1.0 + 5.0,
            5.0,
        ]
    )


def test_a_step_of_those_that_decode() -> None:
    occupancy = OccupancyModel(decode_base_s=0.5, decode_share_s=1.0, kv_tokens=1000)
    decoding, context = np.array([2.0, 2.0]), np.array([200.0, 200.0])
    both = CostModel([info(latency=LINEAR), info(occupancy_latency=occupancy)]).decode_s(decoding, context)
    assert both.tolist() == pytest.approx([1.0 + 2 * 0.5 + 200 * 0.01, 0.5 + 0.2])
    alike = CostModel([info(occupancy_latency=occupancy)] * 2).decode_s(decoding, context)
    assert alike.tolist() == pytest.approx([0.7, 0.7])


def test_one_more_slows_down_those_beside_it() -> None:
    occupancy = OccupancyModel(decode_base_s=0.1, decode_share_s=1.0, kv_tokens=1000)
    made = CostModel([info(latency=LINEAR), info(occupancy_latency=occupancy), info(latency=LINEAR)])
    beside, reading = np.array([2.0, 2.0, 0.0]), np.array([200.0, 200.0, 0.0])
    inputs = CostInputs(100, 16, 10.0, np.zeros(3), np.array([100.0, 100.0, 40.0]))
    _, step_s, slowdown_s = made.predict(inputs, np.array([1.0, 1.0, 3.0]), *nobody(3), beside, reading)
    assert step_s.tolist() == pytest.approx(
        [1.0 + 3 * 0.5 + 300 * 0.01, 0.1 + 0.3, 3 * (1.0 + 0.5 + 40 * 0.01)]
    )
    assert slowdown_s.tolist() == pytest.approx([10 * (0.5 + 1.0), 10 * 0.1, 3 * 10 * (0.5 + 0.4)])


MODELS = [
    LatencyModel(
        base_s=0.5,
        prefill_token_s=0.1,
        prefill_context_s=0.003,
        batch_s=0.5,
        context_token_s=0.01,
        prefill_step_s=2.0,
    ),
    OccupancyModel(prefill_base_s=0.7, prefill_token_s=0.01, prefill_square_s=0.0002, kv_tokens=1000),
]


@given(
    st.integers(1, 500),
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(1, 600), st.sampled_from(MODELS)), min_size=1, max_size=6
    ),
)
def test_all_at_once_as_each_by_itself(
    prompt_tokens: int, given_workers: list[tuple[float, int, Any]]
) -> None:
    held = [int(share * prompt_tokens) for share, _, _ in given_workers]
    infos = [
        info(chunk, **{"latency" if isinstance(model, LatencyModel) else "occupancy_latency": model})
        for _, chunk, model in given_workers
    ]
    times = CostModel(infos).prefill_s(
        prompt_tokens,
        np.array([prompt_tokens - each for each in held], dtype=float),
        *nobody(len(held)),
    )
    wanted = [
        prompt_s(model, prompt_tokens, each, chunk)
        for each, (_, chunk, model) in zip(held, given_workers, strict=True)
    ]
    assert times.tolist() == pytest.approx(wanted)


# --- in one pass

TOKENS = st.integers(0, 5000)
BUSY = st.tuples(
    st.floats(0, 40), st.floats(0, 3), st.integers(0, 3), TOKENS, st.floats(0, 9), st.floats(0, 5e3), TOKENS
)
"""Cached blocks, pace, decoding requests with their context; requests beside the answer, tokens that they read,
and tokens that the answer adds."""


@pytest.mark.skipif(cost_model_module.native_predict is None, reason="it is not built here")
@given(
    st.integers(1, 5000),
    st.sampled_from([1, 16, 64]),
    st.floats(0, 1000),
    st.sampled_from(MODELS),
    st.lists(st.tuples(st.integers(1, 600), BUSY), min_size=1, max_size=6),
)
def test_native_predict_equals_numpy(
    prompt_tokens: int,
    block_size: int,
    output_tokens: float,
    model: LatencyModel | OccupancyModel,
    workers: list[tuple[int, tuple[float, ...]]],
) -> None:
    name = "latency" if isinstance(model, LatencyModel) else "occupancy_latency"
    made = CostModel([info(chunk, **{name: model}) for chunk, _ in workers])
    overlap, pace, *load, joined = np.array([busy for _, busy in workers], dtype=float).T.copy()
    inputs = CostInputs(prompt_tokens, block_size, output_tokens, overlap, joined)
    native = made.predict(inputs, pace, *load)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model_module, "native_predict", None)
        plain = made.predict(inputs, pace, *load)
    for one, other in zip(native, plain, strict=True):
        assert one.tolist() == pytest.approx(other.tolist(), rel=1e-9, abs=1e-12)


def test_workers_of_two_shapes_are_looked_at_in_numpy() -> None:
    made = CostModel([info(latency=MODELS[0]), info(occupancy_latency=MODELS[1]), None])
    overlap, pace = np.array([1.0, 0.0, 2.0]), np.array([2.0, 1.0, 0.5])
    inputs = CostInputs(100, 16, 10.0, overlap, np.full(3, 100.0))
    prefill_s, step_s, _ = made.predict(inputs, pace, *nobody(3), *nobody(3))
    news = np.array([84.0, 100.0, 68.0])
    assert prefill_s.tolist() == pytest.approx((pace * made.prefill_s(100, news, *nobody(3))).tolist())
    assert step_s.tolist() == pytest.approx((pace * made.decode_s(np.ones(3), np.full(3, 100.0))).tolist())


@pytest.mark.skipif(cost_model_module.native_predict is None, reason="it is not built here")
def test_an_array_that_is_too_short_is_refused() -> None:
    made = CostModel([info(latency=MODELS[0])] * 3)
    with pytest.raises(ValueError, match="one number per worker"):
        made.predict(CostInputs(100, 16, 10.0, np.zeros(2), np.zeros(3)), np.ones(3), *nobody(3), *nobody(3))
