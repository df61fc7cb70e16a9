"""The ports of one virtual process in one value, so that a test starts ten of them in a loop."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

from kvolt.testing.loop import InlineBlocking, VirtualClock
from kvolt.testing.network import VirtualHost, VirtualNetwork


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
