"""Blocks that leave one engine for another; the suites of engines see the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from tests.unit.scheduler.scheduler_lab import Lab, request, scheduler

from kvolt.core.block_key import KvBlock
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.kv_exchange import KvExchange
from kvolt.kv import BlockId

BLOCK_BYTES = 4
PROMPT = (1, 2, 3, 4, 5, 6, 7)
ASKED = request("a", PROMPT, max_tokens=1)


@dataclass
class Engine:
    """The half of one that has blocks."""

    num_blocks: int = 16
    data: dict[BlockId, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = scheduler(num_blocks=self.num_blocks)
        self.exchange = KvExchange(self.scheduler, self, BLOCK_BYTES)
        self.lab = Lab(self.scheduler)

    def read(self, block: BlockId) -> bytes:
        return self.data.get(block, bytes([block]) * BLOCK_BYTES)

    def write(self, block: BlockId, data: bytes) -> None:
        self.data[block] = data

    def compute(self, asked: Request = ASKED) -> tuple[KvBlock, ...]:
        self.scheduler.add_request(asked)
        self.lab.run()
        return self.exchange.export_kv(self.exchange.keys(asked))


def test_what_is_here_is_found_and_leaves_with_all_its_names() -> None:
    engine = Engine()
    assert engine.exchange.match(ASKED) == 0
    blocks = engine.compute()
    assert engine.exchange.match(ASKED) == 6
    assert [block.position for block in blocks] == [0, 1, 2]
    assert [block.parent for block in blocks] == [None, blocks[0].key, blocks[1].key]
    assert [block.key for block in blocks] == engine.exchange.keys(ASKED)
    assert engine.exchange.export_kv(engine.exchange.keys(ASKED)[1:]) == blocks[1:]
    (told,) = engine.exchange.contents()
    assert list(told.sequence_hashes) == [block.sequence_hash for block in blocks]


def test_chains_come_in_one_after_the_other() -> None:
    source, target = Engine(), Engine()
    other = request("b", (1, 2, 9, 9, 9), max_tokens=1)
    first, second = source.compute(), source.compute(other)
    assert first[0] == second[0]
    assert target.exchange.import_kv((*first, *second[1:])) == 4
    assert (target.exchange.match(ASKED), target.exchange.match(other)) == (6, 4)
    for blocks in (first, second):
        assert target.exchange.export_kv([block.key for block in blocks]) == blocks
    assert target.scheduler.pool.num_used == 0
    target.scheduler.check_integrity()


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_what_has_no_room_stays_out(num_blocks: int) -> None:
    blocks, target = Engine().compute(), Engine(num_blocks)
    assert target.exchange.import_kv(blocks) == num_blocks
    assert target.exchange.match(ASKED) == 2 * num_blocks
    target.scheduler.check_integrity()


def test_a_block_comes_after_its_parent_and_at_its_place() -> None:
    blocks, target = Engine().compute(), Engine()
    wrong_place = replace(blocks[0], position=1).seal()
    for given in (blocks[1:], (wrong_place,), (replace(blocks[0], data=b"x"),), ()):
        assert target.exchange.import_kv(given) == 0
    assert target.exchange.import_kv((blocks[0], blocks[2])) == 1, "with a gap between"
    assert target.exchange.import_kv((replace(blocks[1], position=2).seal(),)) == 0
    assert target.exchange.import_kv(blocks[1:]) == 2
    assert not target.scheduler.pool.num_used


@pytest.mark.parametrize("num_filled", [0, 1, 2])
def test_what_is_settled_for_a_request_stays_with_what_it_follows(num_filled: int) -> None:
    source, target = Engine(), Engine(num_blocks=4)
    blocks = source.compute()
    assert target.exchange.import_kv(blocks[:1]) == 1
    room = target.exchange.allocate_kv([one.key for one in blocks], [one.sequence_hash for one in blocks])
    assert (room.num_present, len(room.blocks)) == (1, 2)
    target.exchange.commit(room, num_filled, RequestId("a"), 5.0)
    target.scheduler.check_integrity()
    assert target.scheduler.pool.num_used == 1 + num_filled
    assert target.exchange.match(ASKED) == 2 * (1 + num_filled)
    assert target.scheduler.prefetched.next_expiry == 5.0
    target.scheduler.prefetched.expire(5.0)
    assert not target.scheduler.pool.num_used
    assert target.exchange.match(ASKED) == 2 * (1 + num_filled), "it is still cached"
