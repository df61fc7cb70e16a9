"""Harness and runner of the Discovery conformance suite. Must not know any implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvolt.runtime.discovery.port import Discovery, LeaseId


class Harness(Protocol):
    """Test access to an implementation. Time passes with `asyncio.sleep`."""

    @property
    def ttl_s(self) -> float:
        """TTL of the suite's leases: as short as the implementation supports, at most 10 s."""
        ...

    async def client(self) -> Discovery:
        """Return a new client of the store, as another process would use it."""
        ...

    async def crash(self, client: Discovery) -> None:
        """End a client without deregistering."""
        ...

    async def set_reachable(self, reachable: bool) -> None:
        """Make the store unreachable for all clients, or reachable again with its contents."""
        ...

    async def wipe(self) -> None:
        """Delete the contents of the store."""
        ...

    async def close(self) -> None:
        """Close all clients that did not crash, then the store."""
        ...


_LASTING_S = 10.0

Case = Callable[[Harness], Awaitable[None]]


async def run_case(case: Case, make_harness: Callable[[], Harness], timeout_s: float = 60.0) -> None:
    """Run one case with a new harness on the running loop."""
    harness = make_harness()
    try:
        async with asyncio.timeout(timeout_s):
            await case(harness)
    finally:
        await harness.close()


async def leased(harness: Harness) -> tuple[Discovery, LeaseId]:
    client = await harness.client()
    return client, await client.lease(harness.ttl_s)


async def lasting(harness: Harness) -> tuple[Discovery, LeaseId]:
    """A client and a lease that does not expire while the test machine is slow."""
    client = await harness.client()
    return client, await client.lease(_LASTING_S)
