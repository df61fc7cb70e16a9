"""What routers are told of a vLLM's tiers: each block once, by its tokens, and what goes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.engines.vllm.plugins.tier_lab import (
    BLOCK,
    FakeRequest,
    tier_messages,
    tier_scheduler,
)

from kvolt.core.ids import RequestId, SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier
from kvolt.core.request import Request, StopConditions
from kvolt.engines.kv_formats.schema import SourceEngine
from kvolt.engines.kv_formats.translator import SALT_TAG, Translator
from kvolt.engines.vllm.plugins import tier_events, tier_names
from kvolt.engines.vllm.plugins.tier_events import RemovedRun, StoredRun, TierEvents
from kvolt.engines.vllm.plugins.tier_names import BlockDescription, NamesFile, packed_tokens
from kvolt.engines.vllm.plugins.tier_onboard_policy import TierOnboardPolicy
from kvolt.testing.engines.harness import Replica, block_hashes

HOST, DISK = Tier.HOST, Tier.DISK


def described(number: int, parent: int | None = None) -> BlockDescription:
    above = None if parent is None else b"%d" % parent
    return BlockDescription(number, b"%d" % number, above, packed_tokens([number] * BLOCK))


def moved(events: TierEvents, tier: Tier, *numbers: int, is_stored: bool = True) -> None:
    for number in numbers:
        events.on_moved(tier, SequenceHash(number), is_stored=is_stored)


def chains(events: TierEvents) -> list[tuple[Tier, list[bytes]]]:
    found = []
    for change in events.take_events():
        names = change.names if isinstance(change, RemovedRun) else [block.name for block in change.blocks]
        found.append(
            (change.tier, [b"-" + name if isinstance(change, RemovedRun) else name for name in names])
        )
    return found


def test_each_tier_once() -> None:
    events = TierEvents()
    for number in range(3):
        events.describe(described(number, number - 1 if number else None))
    moved(events, HOST, 0, 1, 2)
    moved(events, HOST, 1)
    assert chains(events) == [(HOST, [b"0", b"1", b"2"])]
    moved(events, HOST, 0, 1, 2)
    assert not chains(events)
    moved(events, DISK, 0, 1, 2)
    moved(events, HOST, 2, is_stored=False)
    assert chains(events) == [(DISK, [b"0", b"1", b"2"]), (HOST, [b"-2"])]
    moved(events, DISK, 2, is_stored=False)
    assert chains(events) == [(DISK, [b"-2"])]
    assert not events.is_described(SequenceHash(2))
    assert events.is_described(SequenceHash(1))


def test_blocks_stored_and_removed_between_steps_are_not_published() -> None:
    events = TierEvents()
    events.describe(described(1))
    moved(events, HOST, 1)
    moved(events, HOST, 1, is_stored=False)
    assert events.is_due
    assert not chains(events)
    assert not events.is_due


def test_none_before_the_one_that_it_follows() -> None:
    """As a disk finds them: in any order. Two chains part after the second block."""
    events = TierEvents()
    parents = {1: None, 2: 1, 3: 2, 4: 3, 7: 2, 8: 7, 9: None}
    for number, parent in parents.items():
        events.describe(described(number, parent))
    moved(events, DISK, 8, 4, 9, 2, 7, 3, 1)
    told: set[bytes] = set()
    for change in events.take_events():
        assert isinstance(change, StoredRun)
        above = change.blocks[0].parent
        assert above is None or above in told
        for block in change.blocks:
            assert block.parent == above
            above = block.name
            told.add(block.name)
    assert told == {b"%d" % number for number in parents}


def test_block_is_published_once_it_is_described() -> None:
    events = TierEvents()
    moved(events, HOST, 1)
    moved(events, DISK, 1)
    assert not chains(events)
    events.describe(described(1))
    assert chains(events) == [(HOST, [b"1"]), (DISK, [b"1"])]
    moved(events, HOST, 2)
    assert not chains(events)
    moved(events, HOST, 2, is_stored=False)
    assert not chains(events), "it was never told"


def test_what_never_comes_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_events, "_MAX_EXPECTED", 2)
    events = TierEvents()
    for number in range(3):
        events.describe(described(number))
    assert [events.is_described(SequenceHash(number)) for number in range(3)] == [False, True, True]


def test_disk_is_published_after_a_restart(tmp_path: Path) -> None:
    events = TierEvents(NamesFile(tmp_path))
    for number in range(4):
        events.describe(described(number, number - 1 if number else None))
    moved(events, HOST, 0, 1, 2, 3)
    moved(events, DISK, 0, 1, 2)
    events.flush()
    events.close()
    again = TierEvents(NamesFile(tmp_path))
    moved(again, DISK, 2, 1, 0, 3)
    assert chains(again) == [(DISK, [b"0", b"1", b"2"])], "only what lay on the disk is known again"
    again.close()


def test_many_blocks_are_published_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_events, "_MAX_PER_STEP", 2)
    events = TierEvents()
    for number in range(5):
        events.describe(described(number))
    moved(events, DISK, *range(5))
    sizes = []
    while events.is_due:
        sizes.append(len(events.take_events()))
    assert sizes == [2, 2, 1]


# --- as a router sees it


class Seen:
    """A scheduler's half, its events through vLLM's words and our translator to a replica."""

    def __init__(self, num_workers: int = 1, names: NamesFile | None = None) -> None:
        self.events = TierEvents(names)
        self.scheduler = tier_scheduler.TierScheduler(
            BLOCK,
            num_workers,
            b"model",
            TierOnboardPolicy(BLOCK, 64),
            self.events,
            tier_messages.extra_keys_of,
        )
        self.translator = Translator(SourceEngine.VLLM, BLOCK)
        self.replica = Replica()
        self.changes: list[KvChange] = []

    def told(self, **given: object) -> None:
        self.scheduler.apply_update(tier_messages.TierUpdate(**given))
        self.read()

    def read(self) -> None:
        made = [tier_messages.event_of(change, BLOCK) for change in self.events.take_events()]
        changes = self.translator.translate(msgspec.msgpack.encode([0.0, made, 0])).changes
        for change in changes:
            self.replica.apply(change)
        self.changes += changes

    def numbers(self, request: FakeRequest) -> list[SequenceHash]:
        return [tier_messages.hash_of(tier_messages.key_of(name, b"model")) for name in request.block_hashes]


def ours(request: FakeRequest) -> list[SequenceHash]:
    """What kvolt's routers call the blocks."""
    salt = request.cache_salt.removeprefix(SALT_TAG) if request.cache_salt else None
    made = Request(
        request_id=RequestId("r"),
        model="m",
        token_ids=tuple(request.all_token_ids),
        stop=StopConditions(max_tokens=1),
        salt=salt,
    )
    return block_hashes(made, BLOCK)


def order_down(seen: Seen, request: FakeRequest, num_blocks: int) -> None:
    from tests.unit.engines.vllm.plugins.tier_lab import plan

    seen.scheduler.find_offloaded(request, 0)
    seen.scheduler.on_allocated(request, list(range(num_blocks)), 0)
    seen.scheduler.build_commands(
        plan({request.request_id: (list(range(num_blocks)), 0, num_blocks * BLOCK)})
    )


@pytest.mark.parametrize("salt", [None, SALT_TAG + "tenant"])
def test_a_router_knows_blocks_in_tiers_by_the_names_it_uses(salt: str | None) -> None:
    seen = Seen()
    request = FakeRequest("r", list(range(100, 113)), cache_salt=salt)
    order_down(seen, request, 3)
    numbers = seen.numbers(request)
    seen.told(stored={(HOST, number): 1 for number in numbers})
    assert seen.changes == [Stored.from_hashes(ours(request), None, tier=HOST)]
    seen.told(stored={(DISK, number): 1 for number in numbers}, removed={(HOST, numbers[2]): 1})
    assert seen.changes[1:] == [
        Stored.from_hashes(ours(request), None, tier=DISK),
        Removed.from_hashes(ours(request)[2:], HOST),
    ]
    assert not seen.translator.skipped, json.dumps(seen.translator.skipped)


def test_block_is_published_when_all_workers_have_it_and_removed_with_the_first() -> None:
    seen = Seen(num_workers=2)
    request = FakeRequest("r", list(range(9)))
    order_down(seen, request, 2)
    first, second = seen.numbers(request)
    seen.told(stored={(HOST, first): 2, (HOST, second): 1})
    assert seen.changes == [Stored.from_hashes(ours(request)[:1], None, tier=HOST)]
    assert seen.scheduler.num_blocks_by_tier == {HOST: 1}
    seen.told(stored={(HOST, second): 1})
    assert len(seen.changes) == 2
    assert seen.scheduler.num_blocks_by_tier == {HOST: 2}
    seen.told(removed={(HOST, second): 1})
    assert seen.changes[2:] == [Removed.from_hashes(ours(request)[1:], HOST)]
    seen.told(removed={(HOST, second): 1})
    assert len(seen.changes) == 3


def test_disk_blocks_are_published_when_a_request_finds_them() -> None:
    """No description was kept: another's disk, or a file that was lost."""
    seen = Seen()
    request = FakeRequest("r", list(range(9)))
    seen.told(stored={(DISK, number): 1 for number in seen.numbers(request)})
    assert not seen.changes
    assert seen.scheduler.find_offloaded(request, 0) == 2 * BLOCK
    seen.read()
    assert seen.changes == [Stored.from_hashes(ours(request), None, tier=DISK)]


def test_cleared_blocks_are_not_published_again() -> None:
    seen = Seen()
    request = FakeRequest("r", list(range(9)))
    order_down(seen, request, 2)
    numbers = seen.numbers(request)
    seen.told(stored={(HOST, number): 1 for number in numbers})
    cleared = seen.translator.translate(msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}], 0]))
    assert cleared.changes == (Cleared(),)
    seen.replica.apply(Cleared())
    seen.told(removed={(HOST, number): 1 for number in numbers})
    assert len(seen.changes) == 1


# --- what was kept, and several workers


NUM_KEPT = 12


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tier_names, "_SPARE_RECORDS", 4)
    names = NamesFile(tmp_path)
    for number in range(NUM_KEPT):
        names.keep(described(number))
    names.flush()
    names.close()
    return tmp_path


def listed(num_blocks: int = NUM_KEPT) -> Any:
    return tier_messages.TierUpdate(
        stored=Counter((DISK, SequenceHash(number)) for number in range(num_blocks))
    )


def num_told(seen: Seen) -> int:
    return sum(len(change.blocks) for change in seen.events.take_events() if isinstance(change, StoredRun))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_disk_is_published_when_all_workers_have_reported(kept: Path, num_workers: int) -> None:
    """Perhaps some of them steps later; and before it what else they have."""
    seen = Seen(num_workers, NamesFile(kept))
    seen.scheduler.apply_update(
        tier_messages.TierUpdate(stored=Counter({(HOST, SequenceHash(77)): num_workers}))
    )
    for _ in range(num_workers):
        assert not num_told(seen)
        seen.scheduler.apply_update(listed())
    assert num_told(seen) == NUM_KEPT
    seen.events.close()
    assert len(NamesFile(kept).read()) == NUM_KEPT


def test_initial_updates_are_applied_at_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(2, NamesFile(kept))
    flushed: list[int] = []
    monkeypatch.setattr(seen.events, "flush", lambda: flushed.append(seen.scheduler.num_blocks_by_tier[DISK]))
    seen.scheduler.apply_initial([listed(), listed()])
    assert flushed == [NUM_KEPT]
    assert num_told(seen) == NUM_KEPT
    seen.scheduler.apply_initial([])
    seen.events.close()


def test_what_is_not_found_by_then_is_forgotten(kept: Path) -> None:
    """Or the file would grow with every restart."""
    seen = Seen(2, NamesFile(kept))
    seen.scheduler.apply_initial([listed(), listed(3)])
    assert num_told(seen) == 3
    seen.events.close()
    assert set(NamesFile(kept).read()) == {0, 1, 2}
