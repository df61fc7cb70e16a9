"""Step models: the one that is fitted is in test_card; here is the one of Dynamo's mocker, and what both promise."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvolt.core.latency import LatencyModel, OccupancyModel, StepModel, prompt_s
from kvolt.core.load import StepStats
from kvolt.latency.presets import PRESETS

MODEL = OccupancyModel(
    prefill_base_s=1.0,
    prefill_token_s=0.1,
    prefill_square_s=0.01,
    decode_base_s=2.0,
    decode_share_s=8.0,
    decode_square_s=-4.0,
    decode_least_s=1.0,
    kv_tokens=100,
)


def test_a_prompt_costs_squares_of_its_new_tokens() -> None:
    assert MODEL.prefill_s(10) == pytest.approx(1 + 1 + 1)
    assert MODEL.prefill_s(30, 20) == MODEL.prefill_s(10)
    assert MODEL.prefill_s(10, 10) == 0, "nothing to compute is no step"


def test_a_decode_costs_squares_of_the_share_that_is_read() -> None:
    assert MODEL.decode_s(1, 0) == 2
    assert MODEL.decode_s(1, 50) == pytest.approx(2 + 4 - 1)
    assert MODEL.decode_s(99, 50) == MODEL.decode_s(1, 50), "whatever the batch"
    assert MODEL.decode_s(1, 100) == MODEL.decode_s(1, 10_000) == pytest.approx(2 + 8 - 4)


def test_a_decode_has_a_least_time() -> None:
    assert OccupancyModel(decode_base_s=0.1, decode_least_s=0.5).decode_s(1, 1) == 0.5


def test_a_mixed_step_is_the_sum() -> None:
    step = StepStats(batch=3, prefill_tokens=10, prefill_context=100, context_tokens=50)
    assert MODEL.step_s(step) == pytest.approx(MODEL.prefill_s(10) + MODEL.decode_s(3, 50))


@pytest.mark.parametrize(
    "model", [MODEL, LatencyModel(base_s=1.0, prefill_token_s=0.1, batch_s=0.1, context_token_s=0.1)]
)
def test_what_is_asked_by_parts_is_the_step_as_a_whole(model: StepModel) -> None:
    prompt = StepStats(prefill_tokens=7, prefill_context=7 * 12)
    assert model.prefill_s(12, 5) == model.step_s(prompt)
    assert model.decode_s(3, 40) == model.step_s(StepStats(batch=3, context_tokens=40))


def test_the_first_prompt_token_has_its_own_price() -> None:
    model = LatencyModel(base_s=1.0, prefill_token_s=0.5, prefill_step_s=10.0)
    assert model.decode_s(5, 100) == 1
    assert model.prefill_s(2) == 1 + 1 + 10


def test_a_prompt_in_chunks() -> None:
    model = LatencyModel(base_s=1.0, prefill_token_s=0.1, prefill_context_s=0.01)
    assert prompt_s(model, 100, 0, 1000) == pytest.approx(model.prefill_s(100))
    assert prompt_s(model, 100, 0, 40) == pytest.approx(3 + 10 + 0.01 * (40 * 40 + 40 * 80 + 20 * 100))
    assert prompt_s(model, 100, 90, 40) == pytest.approx(1 + 1 + 0.01 * 10 * 100)
    assert prompt_s(model, 100, 100, 40) == pytest.approx(1 + 0.1 + 0.01 * 100), "its last token"


@pytest.mark.parametrize("price", [math.nan, math.inf, -1e-9])
def test_a_model_that_could_mislead_routers_does_not_decode(price: float) -> None:
    for kind in (LatencyModel, OccupancyModel):
        wire = msgspec.msgpack.encode(kind(prefill_token_s=price))
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(wire, type=kind)


def test_every_preset_decodes() -> None:
    for preset in PRESETS.values():
        wire = msgspec.msgpack.encode(preset.model)
        assert msgspec.msgpack.decode(wire, type=type(preset.model)) == preset.model
