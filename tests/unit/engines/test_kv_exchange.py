"""Blocks that come from elsewhere; the suites of engines see the rest."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.unit.scheduler.scheduler_lab import Lab, request, scheduler

from kvolt.core.ids import RequestId, SequenceHash
from kvolt.core.request import Request
from kvolt.engines.kv_exchange import KvExchange

PROMPT = (1, 2, 3, 4, 5, 6, 7)
ASKED = request("a", PROMPT, max_tokens=1)


@dataclass
class Engine:
    """The half of one that has blocks."""

    num_blocks: int = 16

    def __post_init__(self) -> None:
        self.scheduler = scheduler(num_blocks=self.num_blocks)
        self.exchange = KvExchange(self.scheduler)
        self.lab = Lab(self.scheduler)

    def compute(self, asked: Request = ASKED) -> None:
        self.scheduler.add_request(asked)
        self.lab.run()


def test_what_is_here_is_found() -> None:
    engine = Engine()
    assert engine.exchange.match(ASKED) == 0
    engine.compute()
    assert engine.exchange.match(ASKED) == 6
    (told,) = engine.exchange.contents()
    assert len(told.sequence_hashes) == len(engine.exchange.keys(ASKED)) == 3


@pytest.mark.parametrize("num_filled", [0, 1, 2])
def test_what_is_settled_for_a_request_stays_with_what_it_follows(num_filled: int) -> None:
    target = Engine(num_blocks=4)
    keys, hashes = target.exchange.keys(ASKED), [SequenceHash(number) for number in range(3)]
    target.exchange.commit(target.exchange.allocate_kv(keys[:1], hashes[:1]), 1)
    room = target.exchange.allocate_kv(keys, hashes)
    assert (room.num_present, len(room.blocks)) == (1, 2)
    target.exchange.commit(room, num_filled, RequestId("a"), 5.0)
    target.scheduler.check_integrity()
    assert target.scheduler.pool.num_used == 1 + num_filled
    assert target.exchange.match(ASKED) == 2 * (1 + num_filled)
    assert target.scheduler.prefetched.next_expiry == 5.0
    target.scheduler.prefetched.expire(5.0)
    assert not target.scheduler.pool.num_used
    assert target.exchange.match(ASKED) == 2 * (1 + num_filled), "it is still cached"
