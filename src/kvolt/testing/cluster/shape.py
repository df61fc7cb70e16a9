"""Shape of a virtual cluster: processes, routers and capacities, drawn from a seed."""

from __future__ import annotations

import random
from enum import StrEnum

import msgspec

from kvolt.core.request import Role

_STALLS_EVERY = 8
"""One of this many seeds has no faults but stalls."""
_IDENTITIES_EVERY = 3
"""One of this many seeds checks the access of processes; coprime to the one above."""


class Flow(StrEnum):
    """Where prompts are prefilled."""

    AGGREGATED = "aggregated"
    PREFILL_FIRST = "prefill-first"
    DECODE_FIRST = "decode-first"


class ClusterShape(msgspec.Struct, frozen=True, kw_only=True):
    flow: Flow = Flow.AGGREGATED
    num_workers: int = 2
    """Number of aggregated or decode workers."""
    num_prefill: int = 0
    num_frontends: int = 1
    routers: tuple[str, ...] = ("latency",)
    """Routing policies of the frontends, round-robin."""
    has_router_process: bool = False
    kv_blocks: int = 64
    """KV blocks per engine: few, so that blocks are evicted and requests preempted."""
    host_blocks: int = 0
    """Host-tier blocks per worker; 0 disables the tier."""
    disk_blocks: int = 0
    only_stalls: bool = False
    """Only stalls as faults: no request may fail."""
    has_identities: bool = False
    """Processes have identities with roles, as with a cluster key, and their access is checked."""

    @property
    def main_role(self) -> Role:
        return Role.AGGREGATED if self.flow is Flow.AGGREGATED else Role.DECODE

    def role_of(self, index: int) -> Role:
        """Role of the worker with this index."""
        return self.main_role if index < self.num_workers else Role.PREFILL


def draw_shape(seed: int) -> ClusterShape:
    rng = random.Random(f"{seed}/shape")
    flow = rng.choice((Flow.AGGREGATED, Flow.AGGREGATED, Flow.PREFILL_FIRST, Flow.DECODE_FIRST))
    is_split = flow is not Flow.AGGREGATED
    host_blocks = rng.choice((0, 0, 48, 160))
    return ClusterShape(
        flow=flow,
        num_workers=rng.randint(1, 2 if is_split else 3),
        num_prefill=rng.randint(1, 2) if is_split else 0,
        num_frontends=rng.randint(1, 2),
        routers=rng.choice(
            (("latency",), ("latency",), ("latency", "classic"), ("round-robin", "least-loaded"))
        ),
        has_router_process=rng.random() < 0.25,
        kv_blocks=rng.choice((32, 64, 160)),
        host_blocks=host_blocks,
        disk_blocks=rng.choice((0, 64)) if host_blocks else 0,
        only_stalls=seed % _STALLS_EVERY == _STALLS_EVERY - 1,
        has_identities=seed % _IDENTITIES_EVERY == 0,
    )
