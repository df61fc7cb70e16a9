"""The card of a model that somebody else has loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvolt.core.card import Capacity, EngineInfo, card_hash
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.external.description import card_of, config_of, limits_of
from kvolt.engines.sim.model import EOS, SPECIAL, tokenizer_json


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"eos_token_id": EOS, "bos_token_id": 1, "text_config": {"vocab_size": 900}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[EOS]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    return tmp_path


def test_a_card_has_the_folder_s_texts_and_the_engine_s_figures(model: Path) -> None:
    card = card_of(model, "tiny", context_length=2046, block_size=16, extra_eos=(EOS, 7))
    assert (card.name, card.context_length, card.block_size) == ("tiny", 2046, 16)
    assert card.tokenizer_json == tokenizer_json()
    assert card.eos_token_ids == (EOS, 7), "each once, those that only the engine knows last"
    assert card.bos_token_id == 1
    assert card.defaults["temperature"] == 0.6


def test_of_a_model_that_also_sees_the_text_part_counts(model: Path) -> None:
    assert config_of(model).text.vocab_size == 900
    (model / "config.json").write_text(json.dumps({"vocab_size": 800}))
    assert config_of(model).text.vocab_size == 800


def test_a_config_that_cannot_be_read_is_named(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": "many"}))
    with pytest.raises(ConfigError, match=r"config\.json"):
        config_of(model)


def test_a_step_has_room_for_a_token_of_each_sequence(model: Path) -> None:
    card = card_of(model, "tiny", context_length=2046, block_size=16)
    capacity = Capacity(max_num_seqs=8, max_batch_tokens=4, kv_total_blocks=100)
    info = EngineInfo(
        engine="x",
        role=Role.AGGREGATED,
        model="tiny",
        card=card_hash(card),
        block_size=16,
        capacity=capacity,
    )
    limits = limits_of(info, card, max_waiting=5)
    assert (limits.max_num_seqs, limits.max_batch_tokens, limits.max_waiting) == (8, 8, 5)
    assert (limits.context_length, limits.block_size) == (2046, 16)
