"""Ports of a virtual process."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Self

from kvolt.testing.virtual.loop import InlineBlocking, VirtualClock, VirtualLoop
from kvolt.testing.virtual.network import VirtualHost, VirtualNetwork


@dataclass(frozen=True, slots=True)
class VirtualProcess:
    """Clock, blocking calls, random generator and network of a process."""

    name: str
    clock: VirtualClock
    blocking: InlineBlocking
    rng: random.Random
    network: VirtualHost

    @classmethod
    def on(cls, network: VirtualNetwork, name: str, seed: int) -> Self:
        """Create the process of host `name` on the running loop; its randomness depends only on seed and name."""
        rng = random.Random(f"{seed}/{name}")
        return cls(name, VirtualClock(), InlineBlocking(), rng, network.host(name))


def stall_process(network: VirtualNetwork, name: str) -> None:
    """Stop a process as SIGSTOP does: its code does not run, but its host still receives data.

    Affects code started by `in_process(name, ...)`; the host has the same name.
    """
    network.pause(name)
    _loop().stall(name)


def resume_process(network: VirtualNetwork, name: str) -> None:
    """Resume a stalled process: received data is delivered first, then overdue timers fire."""
    network.resume(name)
    _loop().resume(name)


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "only a virtual loop can stall a process"
    return loop
