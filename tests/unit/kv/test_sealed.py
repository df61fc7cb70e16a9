"""Which blocks have got names lately."""

from __future__ import annotations

from kvolt.core.ids import BlockKey
from kvolt.kv.sealed import SealedLog, SealedRun


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def test_blocks_that_follow_each_other_are_one_run() -> None:
    log = SealedLog(10)
    log.add_run(key(3), None, 0)
    log.add_run(key(5), key(3), 3)
    log.add_run(key(9), key(1), 7)
    assert [log.pop_run(), log.pop_run()] == [SealedRun(key(5), 0), SealedRun(key(9), 7)]
    assert len(log) == 0


def test_the_oldest_runs_are_dropped() -> None:
    log = SealedLog(2)
    for number in range(5):
        log.add_run(key(number), None, 0)
    assert [log.pop_run().tip, log.pop_run().tip] == [key(3), key(4)]
