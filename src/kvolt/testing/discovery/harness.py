"""What the conformance suite of the Discovery port needs of an implementation, and how a case is run.

Must not know any implementation, or what the cases check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvolt.runtime.discovery.port import Discovery, LeaseId


class Harness(Protocol):
    """What the suite needs besides the port. Time passes with `asyncio.sleep`."""

    @property
    def ttl_s(self) -> float:
        """The ttl of the suite's leases: as short as the implementation bears, at most 10 s."""
        ...

    async def client(self) -> Discovery:
        """A new client of the one store, as another process would have it."""
        ...

    async def crash(self, client: Discovery) -> None:
        """End a client without a goodbye."""
        ...

    async def set_reachable(self, reachable: bool) -> None:
        """Take the store away from all clients, or give it back as it was."""
        ...

    async def wipe(self) -> None:
        """Empty the store, as if it was set up anew."""
        ...

    async def close(self) -> None:
        """Close every client made and not crashed, then the store."""
        ...


_LASTING_S = 10.0

Case = Callable[[Harness], Awaitable[None]]


def name(case: Case) -> str:
    return getattr(case, "__name__", repr(case))


async def run_case(case: Case, make_harness: Callable[[], Harness], timeout_s: float = 60.0) -> None:
    """One case with a harness of its own, made on the running loop."""
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
    """For what is not about its end: a machine that stands still for a while must not bring that about."""
    client = await harness.client()
    return client, await client.lease(_LASTING_S)
