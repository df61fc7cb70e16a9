"""KV events of vLLM and SGLang, in both of their shapes, become ours: the same blocks by the names that routers use."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgspec
import pytest

from kvolt.core.hashing import local_hashes, request_seed, sequence_hashes
from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier
from kvolt.engines.kv_formats.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    SourceEngine,
    decode_batch,
)
from kvolt.engines.kv_formats.translator import NAME_BYTES, SALT_TAG, Translator

BLOCK = 4
TOKENS = tuple(range(100, 124))
IMAGE = "0123456789abcdef" + "5" * 48

ROWS = {
    SourceEngine.VLLM: ("lora_id", "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    SourceEngine.SGLANG: ("lora_id", "medium", "metadata"),
}


def pack(*events: Any, dp_rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), *([] if dp_rank is None else [dp_rank])])


class Shape:
    """How an engine of some version writes an event."""

    def __init__(self, engine: SourceEngine, is_map: bool) -> None:
        self.engine = engine
        self.is_map = is_map

    def __repr__(self) -> str:
        return f"{self.engine} {'maps' if self.is_map else 'arrays'}"

    def stored(self, hashes: Any, parent: Any, tokens: Any, size: int = BLOCK, **more: Any) -> Any:
        first = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": size}
        if self.is_map:
            return {"type": "BlockStored", **first, "lora_id": None, "new_field": 1, **more}
        rest = [more.get(name) for name in ROWS[self.engine]]
        return ["BlockStored", *first.values(), *rest]

    def removed(self, hashes: Any, **more: Any) -> Any:
        if self.is_map:
            return {"type": "BlockRemoved", "block_hashes": hashes, **more}
        return ["BlockRemoved", hashes, more.get("medium")]

    def cleared(self) -> Any:
        return {"type": "AllBlocksCleared"} if self.is_map else ["AllBlocksCleared"]


SHAPES = [Shape(engine, is_map) for engine in SourceEngine for is_map in (True, False)]
VLLM, VLLM_ROWS, SGLANG, SGLANG_ROWS = SHAPES


class Lab:
    def __init__(self, shape: Shape = VLLM, **options: Any) -> None:
        self.shape = shape
        self.translator = Translator(shape.engine, BLOCK, **options)

    def give(self, *events: Any) -> list[KvChange]:
        return list(self.translator.translate(pack(*events)).changes)

    def store(self, hashes: Any, parent: Any, tokens: Any, **more: Any) -> list[KvChange]:
        return self.give(self.shape.stored(hashes, parent, list(tokens), **more))

    def remove(self, *hashes: Any, **more: Any) -> list[KvChange]:
        return self.give(self.shape.removed(list(hashes), **more))

    @property
    def skipped(self) -> dict[str, int]:
        return dict(self.translator.skipped)


def ours(tokens: Any = TOKENS, lora: str | None = None, salt: str | None = None) -> list[SequenceHash]:
    return sequence_hashes(local_hashes(tuple(tokens), BLOCK, request_seed(lora, salt)))


def names(changes: list[KvChange]) -> list[int]:
    """Of the only change, a Stored."""
    [change] = changes
    assert isinstance(change, Stored)
    return list(change.sequence_hashes)


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_chain_is_named_by_its_tokens(shape: Shape) -> None:
    lab = Lab(shape)
    [first] = lab.store([-7, 8], None, TOKENS[:8])
    assert first == Stored.from_hashes(ours()[:2])
    [second] = lab.store([9], 8, TOKENS[8:12])
    assert second == Stored.from_hashes([ours()[2]], ours()[1])
    assert lab.remove(8, -7) == [Removed.from_hashes([ours()[1], ours()[0]])]
    assert lab.give(shape.cleared()) == [Cleared()]
    assert lab.translator.num_bytes == 0
    assert lab.skipped == {}


@pytest.mark.parametrize("shape", [VLLM, VLLM_ROWS], ids=repr)
def test_hashes_may_be_bytes(shape: Shape) -> None:
    lab = Lab(shape)
    assert names(lab.store([b"a" * 32, b"b" * 32], None, TOKENS[:8])) == ours()[:2]
    assert names(lab.store([b"c" * 32], b"b" * 32, TOKENS[8:12])) == [ours()[2]]
    assert lab.remove(b"c" * 32) == [Removed.from_hashes([ours()[2]])]


def test_the_rank_is_reported() -> None:
    lab = Lab()
    assert lab.translator.translate(pack(VLLM.cleared(), dp_rank=3)) == ((Cleared(),), 3)
    assert lab.translator.translate(pack()) == ((), None)


def test_several_events_of_a_batch_keep_their_order() -> None:
    lab = Lab()
    changes = lab.give(
        VLLM.stored([1], None, list(TOKENS[:4])), VLLM.removed([1]), VLLM.stored([1], None, list(TOKENS[:4]))
    )
    assert [type(change) for change in changes] == [Stored, Removed, Stored]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("CPU", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("STORAGE", Tier.DISK),
        ("DISK", Tier.DISK),
        ("EXTERNAL", Tier.OBJECT),
    ],
)
def test_media_are_tiers(medium: str | None, tier: Tier) -> None:
    lab = Lab()
    [stored] = lab.store([1], None, TOKENS[:4], medium=medium)
    assert isinstance(stored, Stored)
    assert stored.tier is tier
    assert lab.remove(1, medium=medium) == [Removed.from_hashes([ours()[0]], tier)]


def test_a_copy_in_another_tier_needs_no_tokens() -> None:
    lab = Lab()
    lab.store([1, 2, 3], None, TOKENS[:12])
    [copy] = lab.give(VLLM.stored([2, 3, 99], None, [], size=0, medium="CPU"))
    assert copy == Stored.from_hashes(ours()[1:3], tier=Tier.HOST)
    assert lab.skipped == {"unknown_block": 1}
    assert lab.remove(2) == [Removed.from_hashes([ours()[1]])]
    assert names(lab.store([4], 2, TOKENS[8:12])) == [ours()[2]], "still known by its copy"
    assert lab.remove(2, medium="CPU") == [Removed.from_hashes([ours()[1]], Tier.HOST)]
    assert lab.store([5], 2, TOKENS[8:12]) == []
    assert lab.skipped == {"unknown_block": 1, "unknown_parent": 1}
    [below] = lab.give(VLLM.stored([3], 1, [], medium="STORAGE"))
    assert isinstance(below, Stored)
    assert below.parent == ours()[0]


def test_copies_are_reported_once_and_removed_with_the_last() -> None:
    lab = Lab()
    lab.store([1, 2], None, TOKENS[:8])
    [more] = lab.store([1, 2, 3], None, TOKENS[:12])
    assert isinstance(more, Stored)
    assert (more.sequence_hashes, more.parent) == ((ours()[2],), ours()[1]), "below those that are known"
    assert lab.remove(1, 2) == []
    assert lab.remove(2) == [Removed.from_hashes([ours()[1]])]
    lab.store([1], None, TOKENS[:4])
    changes = lab.store([1, 2, 3], None, TOKENS[:12])
    assert changes == [Stored.from_hashes([ours()[1]], ours()[0])]
    lab.remove(3, 3, 2)
    lab.store([2, 9, 1], None, TOKENS[:12])  # the engine's affair
    assert lab.remove(7) == []
    assert lab.skipped == {"unknown_block": 1}


def test_adapters_and_salts_name_other_blocks() -> None:
    lab = Lab()
    assert names(lab.store([1], None, TOKENS[:4], lora_name="sql")) == ours(lora="sql")[:1]
    assert names(lab.store([2], 1, TOKENS[4:8], lora_name="sql")) == ours(lora="sql")[1:2]
    keys = [["sql", f"{SALT_TAG}me"], ["sql"]]
    both = lab.store([3, 4], None, TOKENS[:8], lora_name="sql", extra_keys=keys)
    assert names(both) == ours(lora="sql", salt="me")[:2]
    below = lab.store([5], 4, TOKENS[8:12], lora_name="sql", extra_keys=[["sql"]])
    assert names(below) == ours(lora="sql", salt="me")[2:3], "the salt goes down with the chain"
    numbered = Lab(SGLANG_ROWS, lora_name={7: "sql"}.get)
    assert names(numbered.store([1], None, TOKENS[:4], lora_id=7)) == ours(lora="sql")[:1]
    assert numbered.store([2], None, TOKENS[:4], lora_id=8) == []
    assert numbered.skipped == {"unknown_lora": 1}


@pytest.mark.parametrize("shape", [SGLANG, SGLANG_ROWS], ids=repr)
def test_salts_of_sglang(shape: Shape) -> None:
    lab = Lab(shape)
    more = {"cache_salt": "me"} if shape.is_map else {"metadata": {"cache_salt": "me"}}
    assert names(lab.store([1], None, TOKENS[:4], **more)) == ours(salt="me")[:1]
    more = {"cache_salt": f"{SALT_TAG}me"} if shape.is_map else {"metadata": {"cache_salt": f"{SALT_TAG}me"}}
    assert lab.store([1], None, TOKENS[:4], **more) == [], "the same block"


def test_media_are_a_part_of_a_block() -> None:
    lab = Lab()
    media = [[], [int("0123456789abcdef", 16)], []]
    expected = sequence_hashes(local_hashes(TOKENS[:12], BLOCK, media=media))
    assert names(lab.store([1, 2, 3], None, TOKENS[:12], extra_keys=[None, [IMAGE], None])) == expected
    assert names(lab.store([4, 5, 6], None, TOKENS[:12], extra_keys=[None, [[IMAGE, -2]], None])) == expected


@pytest.mark.parametrize("key", ["who knows", b"\x01\x02", 5, [], [3, IMAGE], f"{IMAGE}0"])
def test_keys_that_are_not_known_end_the_chain(key: Any) -> None:
    lab = Lab()
    assert names(lab.store([1, 2, 3], None, TOKENS[:12], extra_keys=[None, [key], None])) == ours()[:1]
    assert lab.skipped == {"unknown_keys": 2}
    assert lab.store([4], 3, TOKENS[12:16]) == []
    assert lab.store([5], None, TOKENS[:4], extra_keys=[[key]]) == []
    assert lab.skipped == {"unknown_keys": 3, "unknown_parent": 1}


def test_only_layers_that_need_the_whole_prefix_are_followed() -> None:
    lab = Lab()
    assert lab.store([1], None, TOKENS[:4], group_idx=0, kv_cache_spec_kind="mamba") == []
    assert names(lab.store([1], None, TOKENS[:4], group_idx=1, kv_cache_spec_kind="full_attention"))
    assert lab.store([1], None, TOKENS[:4], group_idx=2, kv_cache_spec_kind="full_attention") == []
    assert lab.store([1], None, TOKENS[:4], group_idx=3, kv_cache_spec_kind="sliding_window") == []
    assert lab.remove(1, group_idx=0) == lab.remove(1, group_idx=2) == []
    assert lab.remove(1, group_idx=1) == [Removed.from_hashes([ours()[0]])]
    assert lab.skipped == {"group": 5}


@pytest.mark.parametrize(
    ("event", "reason", "number"),
    [
        (VLLM.stored([1, 2], None, [1] * 16, size=8), "block_size", 2),
        (VLLM.stored([1, 2], None, [1] * 7), "tokens", 2),
        (VLLM.stored([1], None, [-1] * BLOCK), "tokens", 1),
        (VLLM.stored([1], None, [1] * BLOCK, medium="TAPE"), "medium", 1),
        (VLLM.removed([1, 2], medium="TAPE"), "medium", 2),
        (VLLM.stored([2], 1, [1] * BLOCK), "unknown_parent", 1),
        ({"type": "BlockMigrated"}, "unreadable", 1),
        (["BlockMigrated"], "unreadable", 1),
        ({"type": "BlockStored", "block_hashes": "?"}, "unreadable", 1),
        (["BlockStored"], "unreadable", 1),
        ({}, "unreadable", 1),
        ([], "unreadable", 1),
        (3, "unreadable", 1),
        (VLLM.stored([1], None, [[1, 2]] * BLOCK), "unreadable", 1),
    ],
)
def test_what_cannot_be_named_is_left_out_and_counted(event: Any, reason: str, number: int) -> None:
    lab = Lab()
    assert lab.give(event, VLLM.stored([7], None, list(TOKENS[:4]))) == [Stored.from_hashes([ours()[0]])], (
        "what comes after it is not hurt"
    )
    assert lab.skipped == {reason: number}


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode({"events": []}), b"\x92\x01\xa1\xff"]
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        Lab().translator.translate(payload)


def test_large_maps_and_arrays_are_distinguished() -> None:
    wide = {f"x{number}": 1 for number in range(20)}
    batch = decode_batch(
        pack({"type": "AllBlocksCleared", **wide}, ["AllBlocksCleared", *range(20)]), SourceEngine.VLLM
    )
    assert batch.events == (AllBlocksCleared(), AllBlocksCleared())
    rows = pack(SGLANG_ROWS.stored([1], None, [1]), SGLANG_ROWS.removed([1], medium="GPU"))
    assert decode_batch(rows, SourceEngine.SGLANG).events == (
        BlockStored(block_hashes=(1,), token_ids=(1,), block_size=BLOCK),
        BlockRemoved(block_hashes=(1,), medium="GPU"),
    )


def test_names_are_bounded_and_evictions_are_reported() -> None:
    lab = Lab(max_bytes=3 * NAME_BYTES)
    lab.store([1], None, TOKENS[:4])
    lab.store([1], None, TOKENS[:4], medium="CPU")
    lab.store([2, 3], 1, TOKENS[4:12])
    assert lab.translator.num_bytes == 3 * NAME_BYTES
    changes = lab.store([4], 3, TOKENS[12:16])
    assert changes[1:] == [Removed.from_hashes([ours()[0]]), Removed.from_hashes([ours()[0]], Tier.HOST)]
    assert lab.translator.num_bytes == 3 * NAME_BYTES
    assert lab.remove(1) == []
    assert lab.skipped == {"no_room": 1, "unknown_block": 1}
    lab.store([2], None, TOKENS[:4])  # used again: the next to go is another one
    assert lab.store([5], 4, TOKENS[16:20])[1:] == [Removed.from_hashes([ours()[2]])]


def test_a_name_takes_no_more_than_is_counted() -> None:
    rng = random.Random(1)
    payloads = [
        pack(
            VLLM.stored(
                [rng.randbytes(32) for _ in range(10)], None, [rng.randrange(9999) for _ in range(40)]
            )
        )
        for _ in range(200)
    ]
    tracemalloc.start()
    try:
        translator = Translator(SourceEngine.VLLM, BLOCK)
        for payload in payloads:
            translator.translate(payload)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= translator.num_bytes == 2000 * NAME_BYTES


def test_a_random_engine_holds_what_was_translated() -> None:
    """Prompts that share starts, copies of blocks, evictions from the end: as a set, block by block."""
    rng = random.Random(4)
    lab = Lab()
    copies: dict[tuple[int, ...], int] = {}
    told: set[int] = set()
    for _ in range(400):
        if copies and rng.random() < 0.5:
            ends = [
                path for path in copies if not any(other[: len(path)] == path != other for other in copies)
            ]
            path = rng.choice(ends)
            changes = lab.remove(hash(path))
            copies[path] -= 1
            if not copies[path]:
                del copies[path]
        else:
            path = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 5)))
            known = max(length for length in range(len(path)) if length == 0 or path[:length] in copies)
            new = [path[:length] for length in range(known + 1, len(path) + 1)]
            tokens = [each[-1] for each in new for _ in range(BLOCK)]
            changes = lab.store([hash(each) for each in new], hash(path[:known]) if known else None, tokens)
            for each in new:
                copies[each] = copies.get(each, 0) + 1
        for change in changes:
            if isinstance(change, Stored):
                assert change.parent is None or change.parent in told
                assert told.isdisjoint(change.sequence_hashes)
                told.update(change.sequence_hashes)
            else:
                assert isinstance(change, Removed)
                assert told.issuperset(change.sequence_hashes)
                told.difference_update(change.sequence_hashes)
    assert told == {ours([token for token in path for _ in range(BLOCK)])[-1] for path in copies}
    assert lab.skipped == {}
