"""What the processes of a virtual cluster are made of: engines, tiers, observed events, routers with their clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvolt.core.card import EngineInfo, card_hash
from kvolt.core.endpoints import GENERATE, KV_TOPIC, EndpointAddress, component_name
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Role
from kvolt.engines.contract import Engine, EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.journey.prefill import RoleTarget
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.router.port import RouterContext
from kvolt.router.registry import NewRouter
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.discovery.port import Discovery
from kvolt.runtime.endpoint.server import EndpointServer
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.events.plane_events import PlaneEventOptions, PlaneEvents
from kvolt.runtime.plane.port import RequestPlane
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.testing.cluster.checked_router import CheckedRouter
from kvolt.testing.cluster.client_requests import BLOCK_SIZE, MODEL
from kvolt.testing.cluster.kv_check import KvCheck
from kvolt.testing.cluster.process import TTL_S
from kvolt.testing.cluster.shape import ClusterShape
from kvolt.worker.kv.tiering import TieredEngine, Tiering, TieringFactory
from kvolt.worker.worker import Worker

NAMESPACE = "twin"


_ROLES = {"w": ProcessRole.WORKER, "r": ProcessRole.ROUTER}
"""By the first letter of a process's name; the others are frontends."""


def identity_of(name: str) -> Identity:
    return Identity.of(_ROLES.get(name[0], ProcessRole.FRONTEND), name)


@dataclass(frozen=True, slots=True)
class Member:
    """A running worker."""

    engine: SimEngine
    worker: Worker


class ObservedEvents(MemEvents):
    """Event plane that also passes KV events to KvCheck, before any is lost."""

    def __init__(self, bus: MemBus, publisher: str, kv: KvCheck) -> None:
        super().__init__(bus, publisher)
        self._kv = kv

    def publish(self, topic: str, payload: bytes) -> None:
        if topic == KV_TOPIC:
            self._kv.events.add_batch(payload)
        super().publish(topic, payload)


class ObservedPlaneEvents(PlaneEvents):
    """The same over the request plane, in a cluster whose processes have identities."""

    kv: KvCheck

    def publish(self, topic: str, payload: bytes) -> None:
        if topic == KV_TOPIC:
            self.kv.events.add_batch(payload)
        super().publish(topic, payload)


def plane_events(
    publisher: str,
    identity: Identity,
    discovery: Discovery,
    plane: RequestPlane,
    server: EndpointServer,
    kv: KvCheck,
) -> PlaneEvents:
    options = PlaneEventOptions(namespace=NAMESPACE, lease_ttl_s=TTL_S)
    events = ObservedPlaneEvents(options, publisher, identity, discovery, plane, server)
    events.kv = kv
    return events


def sim_engine(role: Role, kv_blocks: int) -> SimEngine:
    arguments = SimArguments(
        max_num_seqs=32,
        block_size=BLOCK_SIZE,
        kv_blocks=kv_blocks,
        context_length=1024,
        latency=LatencyModel(base_s=0.03, prefill_token_s=0.0002),
        hold_s=10.0,
    )
    return SimEngine(EngineSpec(model=MODEL, role=role), arguments)


def tiering_factory(shape: ClusterShape, folder: Path | None) -> TieringFactory | None:
    """Host tier of a worker, with a disk tier if there is a folder."""
    if not shape.host_blocks:
        return None

    def new(engine: Engine, info: EngineInfo, now, publish) -> Tiering:  # type: ignore[no-untyped-def]
        tiered = cast("TieredEngine", engine)
        slabs = tiered.kv_slabs()
        lower = []
        if folder is not None:
            files = DiskFiles(folder, BlockShape.of(slabs), shape.disk_blocks)
            lower.append((DiskTier(files), 1))
        cache = TieredCache.for_slabs(slabs, shape.host_blocks, lower)
        return Tiering(
            tiered, cache, now, publish, info.step_model, BLOCK_SIZE, info.capacity.max_batch_tokens
        )

    return new


async def role_target(
    runtime: Runtime, new_router: NewRouter, role: Role, fail: Callable[[str], None]
) -> RoleTarget:
    """Router and client of the workers with a role."""
    component = component_name(MODEL, role, card_hash(sim_engine(role, kv_blocks=1).card))
    client = await runtime.client(EndpointAddress(NAMESPACE, component, GENERATE))
    settings = RouterSettings(reload_s=0.0)
    inner = new_router(RouterContext(client, runtime, BLOCK_SIZE, settings, role))
    return RoleTarget(CheckedRouter(inner, client, fail), client)
