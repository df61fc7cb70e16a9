"""Renewals of holds that requests wait for: to each owner, until they begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.engines.vllm.plugins.owner_lab import Owner
from tests.unit.engines.vllm.test_engine import soon

from kvolt.engines.vllm.hold_renewals import HoldRenewals
from kvolt.runtime.tasks import TaskGroup


@pytest.fixture
async def renewals() -> AsyncIterator[HoldRenewals]:
    renewals, task_group = HoldRenewals(), TaskGroup("renewals")
    task_group.start(renewals.run(), "renewals")
    yield renewals
    await task_group.close()
    renewals.close()


def ticket(port: int, host: str = "127.0.0.1", hold_s: float = 0.05) -> dict[str, Any]:
    return {
        "remote_host": host,
        "remote_port": port,
        "remote_engine_id": "engine",
        "remote_request_id": "held",
        "kvolt_hold_s": hold_s,
    }


async def test_each_owner_is_renewed_until_the_request_begins(renewals: HoldRenewals) -> None:
    with Owner() as one, Owner() as other:
        for name, owner in (("a", one), ("b", other)):
            owner.serve("engine", "held")
            renewals.start(name, ticket(owner.port))
        await soon(lambda: min(one.num_renewals, other.num_renewals) >= 3)
        renewals.stop("a")
        renewals.stop("unknown")
        num_before = other.num_renewals
        await soon(lambda: other.num_renewals >= num_before + 2)
        renewals.stop("b")
        assert not renewals
        renewals.start("c", ticket(one.port))
        num_before = one.num_renewals
        await soon(lambda: one.num_renewals > num_before)


async def test_a_hold_is_renewed_as_soon_as_its_reader_has_the_request(renewals: HoldRenewals) -> None:
    with Owner() as owner:
        owner.serve("engine", "held")
        renewals.start("a", ticket(owner.port, hold_s=3600.0))
        await soon(lambda: owner.num_renewals == 1)


async def test_an_address_that_is_none_fails_nothing(renewals: HoldRenewals) -> None:
    with Owner() as owner:
        owner.serve("engine", "held")
        renewals.start("a", ticket(70_000))
        renewals.start("b", ticket(owner.port, host="no host"))
        renewals.start("c", ticket(owner.port))
        await soon(lambda: owner.num_renewals >= 3)
        assert len(renewals._sockets) <= 2, "of what cannot be connected nothing is kept"


async def test_closing_while_requests_wait() -> None:
    renewals = HoldRenewals()
    renewals.start("a", ticket(1, hold_s=3600.0))
    renewals.close()
    assert not renewals
    await asyncio.sleep(0)
