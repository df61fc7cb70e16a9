"""The card of a checkpoint: what a frontend needs, and usable by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kvolt.core.card import card_hash
from kvolt.engines.sim.model import CHAT_TEMPLATE, tokenizer_json
from kvolt.frontend.openai_api.generation import generation_defaults
from kvolt.models.checkpoint import model_card, open_checkpoint
from kvolt.testing.tiny_models import tiny_checkpoint, tiny_gguf


def test_the_card_of_a_folder(tmp_path: Path) -> None:
    generation = {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 1}
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "model", generation=generation), 512)
    card = model_card("tiny", checkpoint, 32)
    assert (card.name, card.block_size, card.context_length) == ("tiny", 32, 512)
    assert card.tokenizer_json == tokenizer_json()
    assert card.chat_template == CHAT_TEMPLATE
    assert card.eos_token_ids == (2, 0)
    assert card.bos_token_id is None
    assert card.tool_parser is None
    assert card.reasoning_parser is None
    sampling = generation_defaults(card.defaults)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 20, 1.0)


def test_a_small_model_has_a_default_limit_and_a_large_one_has_none(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "model"))
    assert model_card("tiny", checkpoint, 16).default_max_tokens == 1024

    class Large:
        """The same model with many layers."""

        def __getattr__(self, name: str) -> Any:
            return getattr(checkpoint, name)

        config = msgspec.structs.replace(checkpoint.config, hidden_size=4096, intermediate_size=14336)

    assert model_card("large", Large(), 16).default_max_tokens is None


def test_a_model_that_does_not_sample_has_no_sampling_defaults(tmp_path: Path) -> None:
    generation = {"eos_token_id": 2, "do_sample": False, "temperature": 0.7}
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "model", generation=generation))
    assert model_card("tiny", checkpoint, 16).defaults == {}


def test_the_card_of_a_gguf_file(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.bos_token_id": 1}
    card = model_card("tiny", open_checkpoint(tiny_gguf(tmp_path / "m.gguf", metadata=metadata)), 16)
    assert json.loads(card.tokenizer_json)["model"]["vocab"] == json.loads(tokenizer_json())["model"]["vocab"]
    assert card.chat_template == CHAT_TEMPLATE
    assert (card.eos_token_ids, card.bos_token_id) == ((2, 0), 1)
    assert card.context_length == 2048


def test_equal_files_give_equal_cards(tmp_path: Path) -> None:
    one = model_card("tiny", open_checkpoint(tiny_gguf(tmp_path / "one.gguf")), 16)
    other = model_card("tiny", open_checkpoint(tiny_gguf(tmp_path / "other.gguf")), 16)
    assert card_hash(one) == card_hash(other)
    assert card_hash(one) != card_hash(model_card("tiny", open_checkpoint(tmp_path / "one.gguf"), 32))
