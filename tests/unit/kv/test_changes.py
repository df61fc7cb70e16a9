"""How changes of a pool are put together."""

from __future__ import annotations

from tests.unit.kv.names import name_of

from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, Removed, Stored, Tier
from kvolt.kv import BlockNames
from kvolt.kv.changes import ChangeLog, PublishedHashes


def stored(*paths: tuple[int, ...]) -> Stored:
    names = [name_of(path) for path in paths]
    parent = name_of(paths[0][:-1]).sequence_hash if len(paths[0]) > 1 else None
    hashes = [name.sequence_hash for name in names]
    return Stored.from_hashes(hashes, parent, len(paths[0]) - 1)


def store(log: ChangeLog, path: tuple[int, ...]) -> None:
    parent = name_of(path[:-1]).sequence_hash if len(path) > 1 else None
    log.store_run(BlockNames.of([name_of(path)]), parent, len(path) - 1)


def log_of(*paths: tuple[int, ...], limit: int = 100) -> ChangeLog:
    log = ChangeLog(limit)
    for path in paths:
        store(log, path)
    return log


def test_a_chain_is_one_run_and_each_branch_another() -> None:
    log = log_of((1,), (1, 2), (1, 2, 3), (1, 4), (5,))
    assert log.take() == (stored((1,), (1, 2), (1, 2, 3)), stored((1, 4)), stored((5,)))
    assert log.take() == ()


def test_removals_in_a_row_are_one_and_order_is_kept() -> None:
    log = log_of((1,), (1, 2))
    one, two = name_of((1,)), name_of((1, 2))
    log.remove_run([two.sequence_hash])
    log.remove_run([one.sequence_hash])
    store(log, (1,))
    removed = Removed.from_hashes([two.sequence_hash, one.sequence_hash])
    assert log.take() == (stored((1,), (1, 2)), removed, stored((1,)))


def test_a_block_stored_after_a_removal_starts_a_run_of_its_own() -> None:
    log = log_of((1,))
    log.remove_run([name_of((7,)).sequence_hash])
    store(log, (1, 2))
    assert log.take() == (stored((1,)), Removed.from_hashes([name_of((7,)).sequence_hash]), stored((1, 2)))


def test_clearing_makes_what_came_before_pointless() -> None:
    log = log_of((1,))
    log.clear()
    store(log, (2,))
    assert log.take() == (Cleared(Tier.DEVICE), stored((2,)))


def test_past_its_limit_it_holds_nothing_and_says_so() -> None:
    log = log_of((1,), (2,), limit=2)
    assert not log.is_lost
    log.remove_run([name_of((1,)).sequence_hash])
    assert log.is_lost
    store(log, (3,))
    assert log.take() == ()
    assert not log.is_lost
    store(log, (4,))
    assert log.take() == (stored((4,)),)


def test_clearing_also_ends_a_loss() -> None:
    log = log_of((1,), (2,), limit=1)
    assert log.is_lost
    log.clear()
    assert not log.is_lost
    assert log.take() == (Cleared(Tier.DEVICE),)


def test_a_hash_is_gone_with_the_last_name_that_has_it() -> None:
    told = PublishedHashes()
    one, two, three = (SequenceHash(each) for each in (1, 2, 3))
    told.add_all([one, two])
    told.add_all([two, three, two])
    assert told.counts() == {1: 1, 2: 3, 3: 1}
    assert told.remove_all([two, one]) == [one]
    assert told.remove_all([three, two]) == [three]
    assert told.remove_all([two]) == [two]
    assert told.counts() == {}


def test_a_hash_twice_in_one_run_counts_twice() -> None:
    told = PublishedHashes()
    told.add_all([SequenceHash(7), SequenceHash(8), SequenceHash(7)])
    assert told.counts() == {7: 2, 8: 1}
    told.clear()
    assert told.counts() == {}
