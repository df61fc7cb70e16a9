"""From an OpenAI request to ours: defaults, the context's limit, hashes."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from kvolt.core.errors import InvalidRequest
from kvolt.core.hashing import local_hashes, sequence_hashes
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.sim_model import sim_card
from kvolt.frontend.app import _build_request
from kvolt.frontend.models import Model
from kvolt.frontend.openai import parse_completion
from kvolt.frontend.text import Codec

CARD = sim_card("m", 200, 16)
MODEL = Model(CARD, Codec(CARD), cast(Any, None), cast(Any, None))


def build(prompt: tuple[int, ...], max_tokens: int | None = None, **fields: Any) -> Request:
    asked = parse_completion(json.dumps({"model": "m", "prompt": "", **fields}).encode())
    return _build_request(RequestId("r"), asked, MODEL, prompt, max_tokens)


def test_defaults() -> None:
    request = build((5, 6, 7))
    assert (request.request_id, request.model, request.token_ids) == ("r", "m", (5, 6, 7))
    assert request.stop.max_tokens == 128
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.num_choices) == (1.0, 1.0, None, 1)


def test_what_was_asked_for() -> None:
    request = build((5,), 9, temperature=0, top_p=0, seed=0, n=3)
    assert request.stop.max_tokens == 9
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.num_choices) == (0.0, 0.0, 0, 3)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 48, 100])
def test_the_hashes_are_those_of_core(num_tokens: int) -> None:
    prompt = tuple(range(3, 3 + num_tokens))
    request = build(prompt)
    local = local_hashes(prompt, 16)
    assert request.block_size == 16
    assert list(request.local_hashes) == list(local)
    assert list(request.sequence_hashes) == list(sequence_hashes(local))
    assert len(request.sequence_hashes) == num_tokens // 16


def test_the_default_shrinks_to_the_room_that_is_left() -> None:
    assert build(tuple(range(150))).stop.max_tokens == 50
    assert build(tuple(range(199))).stop.max_tokens == 1


def test_the_context_is_a_limit() -> None:
    assert build((1,) * 100, 100).stop.max_tokens == 100
    for num_prompt, max_tokens in ((100, 101), (200, 1), (200, None), (201, None), (1, 10**30)):
        with pytest.raises(InvalidRequest) as caught:
            build((1,) * num_prompt, max_tokens)
        assert "200" in caught.value.message


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        build(())
