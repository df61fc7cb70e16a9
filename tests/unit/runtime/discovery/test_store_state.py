"""When a join server counts as lost and as back, and the pauses between tries."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvolt.runtime.discovery.store_state import Backoff, StoreState
from kvolt.testing.virtual.loop import run_virtual


def test_lost_with_the_first_failure_back_with_the_last_recovery() -> None:
    told: list[bool] = []
    state = StoreState("host:1", told.append)
    state.mark_working("keeper")
    state.mark_working("follower")
    state.mark_failed("keeper", "gone")
    state.mark_failed("follower", "gone")
    assert told == [True, False]
    state.mark_working("follower")
    assert told == [True, False]
    state.mark_working("keeper")
    assert told == [True, False, True]


def test_a_store_that_was_never_reached_has_no_last_known_state(caplog: pytest.LogCaptureFixture) -> None:
    state = StoreState("join_server=host:1", None)
    state.mark_failed("keeper", "refused")
    assert caplog.messages == ["discovery unreachable: join_server=host:1 reason=refused; retrying"]
    state.mark_working("keeper")
    state.mark_failed("keeper", "gone")
    assert caplog.messages[-1] == "discovery lost: join_server=host:1 reason=gone; using the last known state"


def test_a_task_that_ends_while_it_fails_does_not_leave_the_server_lost() -> None:
    told: list[bool] = []
    state = StoreState("host:1", told.append)
    state.mark_working("follower")
    state.mark_failed("keeper", "gone")
    state.remove_task("keeper")
    assert told == [True, False, True]


def test_with_no_task_left_nothing_is_known() -> None:
    told: list[bool] = []
    state = StoreState("host:1", told.append)
    state.mark_failed("keeper", "gone")
    state.remove_task("keeper")
    assert told == [False]
    state.mark_working("another keeper")
    assert told == [False, True]


def test_pauses_double_up_to_their_bound_and_start_anew() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        backoff = Backoff(random.Random(1), max_s=1.0)
        pauses = []
        for number in range(8):
            started = loop.time()
            await backoff.pause()
            pauses.append(loop.time() - started)
            if number == 6:
                backoff.reset()
        return pauses

    nominal = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 0.1]
    pauses = run_virtual(main)
    assert all(0.75 * wanted <= pause <= 1.25 * wanted for pause, wanted in zip(pauses, nominal, strict=True))
    assert len(set(pauses)) == len(pauses)
