"""ModelCard's content address, and EngineInfo as it is registered."""

from __future__ import annotations

import msgspec
import pytest

from kvolt.core.card import HASH_SCHEME, Capacity, EngineInfo, MeasuredLink, ModelCard, card_hash
from kvolt.core.ids import CardHash
from kvolt.core.latency import LatencyModel, OccupancyModel
from kvolt.core.load import StepStats
from kvolt.core.request import Role

CARD = ModelCard(
    name="m",
    tokenizer_json=b"{}",
    context_length=4096,
    block_size=16,
    eos_token_ids=(2,),
    defaults={"temperature": 0.7, "top_p": 0.9},
)


def test_equal_cards_have_equal_hashes() -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(CARD), type=ModelCard)
    assert card_hash(again) == card_hash(CARD)
    turned = msgspec.structs.replace(CARD, defaults={"top_p": 0.9, "temperature": 0.7})
    assert card_hash(turned) == card_hash(CARD), "the order of a map says nothing"


def test_the_hash_is_the_same_on_any_machine() -> None:
    assert card_hash(CARD) == "542a4d579c22734b0eaed017cb1a39e3"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "n"},
        {"tokenizer_json": b"{ }"},
        {"chat_template": "x"},
        {"context_length": 4097},
        {"block_size": 32},
        {"eos_token_ids": (2, 3)},
        {"bos_token_id": 0},
        {"tool_parser": "t"},
        {"reasoning_parser": "r"},
        {"defaults": {"temperature": 0.7}},
        {"aliases": ("a",)},
        {"default_max_tokens": 64},
    ],
)
def test_any_difference_changes_the_hash(change: dict[str, object]) -> None:
    assert card_hash(msgspec.structs.replace(CARD, **change)) != card_hash(CARD)


def test_every_field_is_tried() -> None:
    tried = {
        name
        for mark in test_any_difference_changes_the_hash.pytestmark
        for row in mark.args[1]
        for name in row
    }
    assert tried == set(ModelCard.__struct_fields__)


def test_engine_info_round_trip() -> None:
    info = EngineInfo(
        engine="sim",
        role=Role.DECODE,
        model="m",
        card=CardHash("c"),
        block_size=16,
        capacity=Capacity(max_num_seqs=8, max_batch_tokens=2048, kv_total_blocks=100),
        links={"h:1": MeasuredLink("tcp", 1e9, 0.001)},
        latency=LatencyModel(base_s=0.01),
        loras=("sql", "poet"),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=EngineInfo) == info
    assert info.hash_scheme == HASH_SCHEME


def test_the_other_shape_of_step_model_travels_beside_the_first() -> None:
    """Registrations of versions that know only one of them stay readable, both ways."""
    linear, by_share = LatencyModel(base_s=0.01), OccupancyModel(decode_base_s=0.01, kv_tokens=100)
    info = EngineInfo(
        engine="sim",
        role=Role.AGGREGATED,
        model="m",
        card=CardHash("c"),
        block_size=16,
        capacity=Capacity(max_num_seqs=8, max_batch_tokens=2048, kv_total_blocks=100),
    )
    assert info.step_model is None
    assert "occupancy_latency" not in msgspec.to_builtins(info)
    assert msgspec.structs.replace(info, latency=linear).step_model == linear
    told = msgspec.structs.replace(info, occupancy_latency=by_share)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=EngineInfo).step_model == by_share
    old = msgspec.to_builtins(msgspec.structs.replace(info, latency=linear))
    del old["latency"]["prefill_step_s"]
    assert msgspec.convert(old, EngineInfo).latency == linear


MODEL = LatencyModel(
    base_s=1.0, prefill_token_s=10.0, prefill_context_s=100.0, batch_s=1000.0, context_token_s=10_000.0
)


def test_step_model() -> None:
    step = StepStats(batch=1, prefill_tokens=2, prefill_context=3, context_tokens=4, time_s=99.0)
    assert MODEL.step_s(step) == 1 + 2 * 10 + 3 * 100 + 1 * 1000 + 4 * 10_000


def test_prefill_counts_only_what_is_not_cached() -> None:
    assert MODEL.prefill_s(10) == 1 + 10 * 10 + 10 * 10 * 100
    assert MODEL.prefill_s(10, 7) == 1 + 3 * 10 + 3 * 10 * 100
    assert MODEL.prefill_s(10, 12) == 1, "more cached than asked for costs a step, never less"


def test_decode() -> None:
    assert MODEL.decode_s(2, 30) == 1 + 2 * 1000 + 30 * 10_000


def test_a_term_of_a_newer_version_is_ignored() -> None:
    """It comes with registrations, which older frontends must still understand."""
    assert msgspec.json.decode(b'{"base_s": 1, "magic_s": 2}', type=LatencyModel) == LatencyModel(base_s=1)
