"""The ports of one virtual process in one value, so that a test starts ten of them in a loop."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Self

from kvolt.testing.virtual.loop import InlineBlocking, VirtualClock, VirtualLoop
from kvolt.testing.virtual.network import VirtualHost, VirtualNetwork


@dataclass(frozen=True, slots=True)
class VirtualProcess:
    """What a process gets from outside: time, blocking calls, chance and its host's network."""

    name: str
    clock: VirtualClock
    blocking: InlineBlocking
    rng: random.Random
    network: VirtualHost

    @classmethod
    def on(cls, network: VirtualNetwork, name: str, seed: int) -> Self:
        """The process of host `name` on the running loop; its chance depends on nothing but seed and name."""
        rng = random.Random(f"{seed}/{name}")
        return cls(name, VirtualClock(), InlineBlocking(), rng, network.host(name))


def stall_process(network: VirtualNetwork, name: str) -> None:
    """Stop a process as SIGSTOP does: nothing of it runs while its host still takes in what peers send.

    Holds for what was started by `in_process(name, ...)`; `name` is its host's, too.
    """
    network.pause(name)
    _loop().stall(name)


def resume_process(network: VirtualNetwork, name: str) -> None:
    """Let a stalled process run again: what its peers sent arrives first, then its timers fire, late."""
    network.resume(name)
    _loop().resume(name)


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "only a virtual loop can stall a process"
    return loop
