"""The half in vLLM's workers: blocks of its memory down and up, beside its steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from tests.unit.engines.vllm.plugins.tier_lab import tier_messages, tier_worker
from tests.waits import MUST_HAPPEN_S

from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.engines.vllm.arguments import VllmTiers
from kvolt.kv.tiers.slot_memory import SlotMemory

NUM_BLOCKS = 8
TierCommands, BlockMove = tier_messages.TierCommands, tier_messages.BlockMove


def memory() -> list[torch.Tensor]:
    """Of two layers."""
    made = torch.arange(2 * NUM_BLOCKS * 16, dtype=torch.float32)
    return list(made.reshape(2, NUM_BLOCKS, 2, 8).clone())


@pytest.fixture
def layers() -> list[torch.Tensor]:
    return memory()


@pytest.fixture
def worker(layers: list[torch.Tensor]) -> Iterator[Any]:
    made = tier_worker.TierWorker(layers, NUM_BLOCKS, VllmTiers(host="6blocks"), "piece")
    yield made
    made.close()


def moves(*numbers: int, first: int = 0) -> list[Any]:
    keys = [BlockKey((b"%d" % (first + index)).ljust(16, b"x")) for index in range(len(numbers) + 1)]
    return [
        BlockMove(keys[index], keys[index - 1] if index else None, index, number)
        for index, number in enumerate(numbers)
    ]


def step(worker: Any, orders: Any) -> tuple[set[str], set[str], Any]:
    """As vLLM makes one."""
    worker.begin_step(orders)
    worker.start_loads(orders)
    worker.start_stores(orders)
    gone, brought = worker.take_finished()
    return gone, brought, worker.take_update()


def until_gone(worker: Any, name: str, orders: Any = None) -> list[Any]:
    """From the step with these orders on; what the steps told."""
    told = []
    for _ in range(200):
        gone, _, news = step(worker, orders or TierCommands())
        orders = None
        told += [news] if news is not None else []
        if name in gone:
            return told
        sleep(0.01)
    raise AssertionError(f"{name} is never done")


def bring(worker: Any, *numbers: int) -> set[int]:
    """The first blocks into these; those that did not come."""
    orders = TierCommands(loads={"b": moves(*numbers)})
    for _ in range(200):
        if "b" in step(worker, orders)[1]:
            failed: set[int] = worker.take_failed()
            return failed
        orders = TierCommands()
        sleep(0.01)
    raise AssertionError("they never come")


def test_blocks_are_offloaded_and_loaded_and_reported_once(worker: Any, layers: list[torch.Tensor]) -> None:
    told = until_gone(worker, "a", TierCommands(stores={"a": moves(3, 1)}, awaited={"a"}, timed=7))
    stored = [copy for each in told for copy in each.stored.elements()]
    assert stored == [(Tier.HOST, tier_messages.hash_of(each.key)) for each in moves(3, 1)]
    assert told[-1].counters[Tier.HOST].num_stored == 2
    assert told[-1].counters[Tier.HOST].block_s > 0
    for layer in layers:
        layer[[3, 1]] = -1.0
    assert not bring(worker, 5, 6)
    for layer, before in zip(layers, memory(), strict=True):
        assert torch.equal(layer[[5, 6]], before[[3, 1]])


def test_missing_blocks_are_reported_as_failed(worker: Any) -> None:
    until_gone(worker, "a", TierCommands(stores={"a": moves(3)}, awaited={"a"}))
    assert bring(worker, 5, 6) == {6}


def test_a_step_is_timed_where_that_is_asked(worker: Any) -> None:
    worker.take_update()
    orders = TierCommands(timed=7)
    worker.begin_step(orders)
    sleep(0.05)
    worker.start_stores(orders)
    told = worker.take_update()
    assert 0.05 <= told.step_s[7] < MUST_HAPPEN_S
    assert worker.take_update() is None
    assert step(worker, TierCommands())[2] is None


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """None ends before this is set."""
    may_end, fill = threading.Event(), SlotMemory.fill

    def slowly(self: SlotMemory, *given: Any) -> Any:
        made = fill(self, *given)
        assert may_end.wait(MUST_HAPPEN_S)
        return made

    monkeypatch.setattr(SlotMemory, "fill", slowly)
    return may_end


def test_steps_continue_while_blocks_are_copied(slow_copies: threading.Event, worker: Any) -> None:
    step(worker, TierCommands(stores={"a": moves(3)}))
    began_at = monotonic()
    for _ in range(5):
        gone, _, _ = step(worker, TierCommands(awaited={"a"}))
        assert not gone, "its blocks would be another's"
    step(worker, TierCommands(preempted={"another"}))
    assert monotonic() - began_at < MUST_HAPPEN_S, "a step waits for a copy"
    slow_copies.set()
    until_gone(worker, "a")


def test_a_preempted_request_is_waited_for(slow_copies: threading.Event, worker: Any) -> None:
    step(worker, TierCommands(stores={"a": moves(3)}))
    threading.Timer(0.3, slow_copies.set).start()
    worker.begin_step(TierCommands(preempted={"a"}))
    assert slow_copies.is_set(), "others' bytes would be copied"


def test_what_takes_too_long_is_not_kept(
    slow_copies: threading.Event, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_worker, "_FENCE_S", 0.05)
    step(worker, TierCommands(stores={"a": moves(3)}))
    worker.begin_step(TierCommands(preempted={"a"}))
    slow_copies.set()
    told = until_gone(worker, "a", TierCommands(awaited={"a"}))
    assert not any(each.stored for each in told)
    assert told[-1].counters[Tier.HOST].failures == {"late": 1}


def test_clear_is_reported_with_its_step(worker: Any) -> None:
    until_gone(worker, "a", TierCommands(stores={"a": moves(3, 1)}, awaited={"a"}))
    _, _, told = step(worker, TierCommands(clear=True))
    assert len(told.removed) == 2
    assert bring(worker, 5) == {5}


def test_initial_disk_blocks_are_reported(tmp_path: Path) -> None:
    tiers = VllmTiers(host="6blocks", disk="20blocks", disk_dir=str(tmp_path))
    for number in range(2):
        worker = tier_worker.TierWorker(memory(), NUM_BLOCKS, tiers, "piece")
        try:
            told = worker.take_update()
            if number:
                assert len(told.stored) == 2
                assert {tier for tier, _ in told.stored} == {Tier.DISK}
                assert set(told.counters) == {Tier.HOST, Tier.DISK}
            else:
                assert not told.stored
                until_gone(worker, "a", TierCommands(stores={"a": moves(3, 1)}, awaited={"a"}))
        finally:
            worker.close()
