from __future__ import annotations

from typing import Any

from kvolt.core.hashing import BASE_SEED, local_hashes, request_seed, sequence_hashes
from kvolt.core.kv_events import Cleared, Removed, Stored, Tier
from kvolt.engines.kv_formats.trtllm_seeds import SequenceSeeds
from kvolt.engines.kv_formats.trtllm_translator import TrtllmTranslator
from kvolt.testing.engines.harness import Replica

SIZE = 4
TOKENS = tuple(range(50, 50 + 3 * SIZE))
FIRST, SECOND, THIRD = sequence_hashes(local_hashes(TOKENS, SIZE))
WINDOW = 4096


class Lab:
    """Events with numbers of their own, and a replica that holds what comes of them against the contract."""

    def __init__(self, *, max_names: int = 1 << 19, book: SequenceSeeds | None = None) -> None:
        self.book = book or SequenceSeeds(SIZE)
        self.translator = TrtllmTranslator(SIZE, self.book, max_names)
        self.replica = Replica()
        self.number = 0

    def read(self, data: dict[str, Any], window: int = WINDOW, **more: Any) -> list[Any]:
        event = {"event_id": self.number, "data": data, "window_size": window, **more}
        self.number += 1
        changes = self.translator.translate(event)
        for change in changes:
            self.replica.apply(change)
        return changes

    def begin(self, seed: int = BASE_SEED, tokens: tuple[int, ...] = TOKENS) -> None:
        self.book.begin("r", seed, tokens)


def block(
    number: int, tokens: tuple[int, ...], level: int = 0, extra: int = 0, **more: Any
) -> dict[str, Any]:
    told = [{"type": "unique_token", "token_id": each, "token_extra_id": extra} for each in tokens]
    return {
        "type": "stored_block",
        "block_hash": number,
        "tokens": told,
        "cache_level": level,
        "priority": 35,
        **more,
    }


def stored(*blocks: dict[str, Any], parent: int | None = None) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def removed(*numbers: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(numbers)}


def moved(number: int, new: int, old: int) -> dict[str, Any]:
    level = {"type": "event_diff", "new_value": new, "old_value": old}
    return {
        "type": "updated",
        "block_hash": number,
        "cache_level": level,
        "priority": {"type": "event_diff", "new_value": 1, "old_value": 1},
    }


A, B, C = (
    block(number, TOKENS[SIZE * index : SIZE * index + SIZE]) for index, number in enumerate((1, 2, 3))
)


def test_blocks_have_our_names() -> None:
    lab = Lab()
    lab.begin()
    assert lab.read({"type": "created", "num_blocks_per_cache_level": [100, 0]}) == []
    assert lab.read(stored(A, B)) == [Stored.from_hashes([FIRST, SECOND])]
    assert lab.read(stored(C, parent=2)) == [Stored.from_hashes([THIRD], SECOND)]
    assert lab.read(removed(3, 1)) == [Removed.from_hashes([THIRD, FIRST])]


def test_a_block_is_reported_once() -> None:
    lab = Lab()
    lab.begin()
    lab.read(stored(A))
    assert lab.read(stored(A, B)) == [Stored.from_hashes([SECOND], FIRST)]
    assert lab.read(stored(A, B)) == []
    lab.read(removed(2))
    assert lab.read(stored(B, parent=1)) == [Stored.from_hashes([SECOND], FIRST)]


def test_what_cannot_be_named_is_left_out() -> None:
    lab = Lab()
    lab.begin()
    partial = block(2, TOKENS[SIZE : SIZE + 2])
    assert lab.read(stored(A, partial, C)) == [Stored.from_hashes([FIRST])]
    assert lab.read(stored(C, parent=99)) == []
    assert lab.read(removed(2, 99)) == []
    assert lab.read(stored(block(4, TOKENS[SIZE : 2 * SIZE], extra=5), parent=1)) == []
    assert lab.read(stored(block(5, TOKENS[SIZE : 2 * SIZE], mm_keys=[{}]), parent=1)) == []
    assert lab.read(stored(block(6, TOKENS[SIZE : 2 * SIZE], level=7), parent=1)) == []
    assert lab.read(stored(block(7, (-1, 2, 3, 4)))) == []
    assert lab.read({"type": "strange"}) == []
    assert lab.translator.skipped == {
        "partial": 1,
        "below": 1,
        "unknown_parent": 1,
        "unknown_block": 2,
        "media": 2,
        "level": 1,
        "tokens": 1,
        "unreadable": 1,
    }


def test_other_windows_are_left_out() -> None:
    lab = Lab()
    lab.begin()
    for window in (1024, WINDOW, 512):
        lab.read({"type": "created", "num_blocks_per_cache_level": [100]}, window=window)
    assert lab.read(stored(A), window=1024) == []
    assert lab.read(stored(A)) == [Stored.from_hashes([FIRST])]
    assert lab.read(removed(1), window=512) == []
    assert lab.replica.blocks == {FIRST}


def test_lost_events_clear_reported_blocks() -> None:
    lab = Lab()
    lab.begin()
    lab.read(stored(A, B))
    lab.number += 5
    assert lab.read(stored(C, parent=2)) == [Cleared()]
    assert lab.translator.num_lost == 5
    assert lab.read(removed(1)) == []
    assert lab.read(stored(A)) == [Stored.from_hashes([FIRST])]


def test_blocks_go_to_the_host_and_back() -> None:
    lab = Lab()
    lab.begin()
    lab.read(stored(A, B))
    assert lab.read(moved(2, 1, 0)) == [
        Stored.from_hashes([SECOND], FIRST, tier=Tier.HOST),
        Removed.from_hashes([SECOND], Tier.DEVICE),
    ]
    assert lab.read(moved(2, 1, 1)) == []
    assert lab.read(moved(99, 1, 0)) == []
    assert lab.read(moved(2, 0, 1))[0] == Stored.from_hashes([SECOND], FIRST)
    assert lab.read(moved(2, 5, 0)) == [Removed.from_hashes([SECOND])]
    assert lab.replica.blocks == {FIRST}


def test_names_are_bounded() -> None:
    lab = Lab(max_names=2)
    lab.begin()
    changes = lab.read(stored(A, B, C))
    assert changes[-1] == Removed.from_hashes([FIRST])
    assert lab.replica.blocks == {SECOND, THIRD}


def test_blocks_of_tenants_are_distinguished() -> None:
    lab = Lab()
    salted = request_seed(None, "tenant")
    lab.begin()
    lab.read(stored(A))
    lab.begin(salted)
    (change,) = lab.read(stored(block(11, TOKENS[:SIZE]), block(12, TOKENS[SIZE : 2 * SIZE])))
    assert change == Stored.from_hashes(sequence_hashes(local_hashes(TOKENS[: 2 * SIZE], SIZE, salted)))
    lab.read(removed(1, 12, 11))
    assert lab.read(stored(A)) == [Stored.from_hashes([FIRST])], "by its name it is known again"


def test_a_block_with_an_ambiguous_seed_is_skipped() -> None:
    lab = Lab()
    assert lab.read(stored(A)) == [], "of no request that was given"
    lab.begin()
    lab.begin(request_seed("adapter", None))
    assert lab.read(stored(A)) == []
    assert lab.translator.skipped == {"seed": 2}


def test_a_first_block_that_the_answer_fills() -> None:
    book = SequenceSeeds(SIZE)
    seed = request_seed(None, "tenant")
    book.begin("r", seed, TOKENS[:1])
    assert book.find(1, TOKENS[:SIZE]) is None
    book.grow("r", TOKENS[1:3])
    book.grow("r", TOKENS[3:6])
    book.grow("r", TOKENS[6:7])
    assert book.find(1, TOKENS[:SIZE]) == seed
    book.begin("gone", seed, TOKENS[:1])
    book.end("gone")
    book.grow("gone", TOKENS)
    assert not book._open


def test_roots_are_bounded() -> None:
    book = SequenceSeeds(1, max_roots=2)
    for token in (1, 2, 1, 3):
        book.begin("r", BASE_SEED, (token,))
    assert [book.find(token, (token,)) for token in (1, 2, 3)] == [BASE_SEED, None, BASE_SEED]
