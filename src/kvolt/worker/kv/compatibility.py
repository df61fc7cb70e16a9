"""Check at registration whether a prefill and a decode worker can exchange KV.

A prefill worker that is incompatible with all decode workers fails. A decode worker only logs it: it can serve without
prefill workers, the fault may be theirs, and rollouts start with decode workers. Workers that miss each other (they
register at the same moment, or discovery is lost) are filtered by frontends (`frontend.kv_pair_filter`).
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvolt.core.card import EngineInfo, KvSlabs
from kvolt.core.endpoints import (
    GENERATE,
    EndpointAddress,
    Instance,
    InstanceState,
    component_name,
    decode_instance,
)
from kvolt.core.errors import MALFORMED, ConfigError, DiscoveryLost, Unsupported
from kvolt.core.request import Role
from kvolt.engines.contract import Engine, KvAddressable
from kvolt.runtime.runtime import Runtime
from kvolt.transfer.memory.layout import SlabLayout, why_incompatible

log = logging.getLogger(__name__)

PEER_ROLES = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
"""Role that each role exchanges KV with."""

_LEASES = 1.5
"""Lease times after which a lost worker is no longer registered."""

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


def with_slabs(info: EngineInfo, engine: Engine) -> EngineInfo:
    """Add the KV layout, if the role exchanges KV and the blocks are in memory that peers can read."""
    if (
        info.role not in PEER_ROLES
        or "KvAddressable" not in info.features
        or not isinstance(engine, KvAddressable)
    ):
        return info
    try:
        layout = engine.kv_slabs()[0].layout
    except Unsupported:
        return info
    if layout is None:
        return info
    slabs = KvSlabs(block=layout.block, total_kv_heads=layout.total_kv_heads, tp_degree=layout.tp_degree)
    return msgspec.structs.replace(info, kv_slabs=slabs)


def find_mismatch(mine: KvSlabs | None, theirs: KvSlabs | None) -> str | None:
    """Why two workers cannot exchange KV, with the remedy. None if they can, or if a layout is unknown."""
    ours, others = _layout(mine), _layout(theirs)
    return None if ours is None or others is None else why_incompatible(ours, others)


async def check_peers(runtime: Runtime, namespace: str, info: EngineInfo) -> None:
    """ConfigError for a prefill worker that cannot exchange KV with any registered decode worker of the same model and
    card. Waits until registrations of lost workers have expired."""
    incompatible = await _find_incompatible(runtime, namespace, info)
    if incompatible is None:
        return
    instance, reason = incompatible
    if info.role is Role.DECODE:
        log.error(
            "KV layouts incompatible, prompts are computed locally: worker=%s peer=%s reason=%s",
            runtime.options.name,
            _named(instance),
            reason,
        )
        return
    wait_s = _LEASES * runtime.options.lease_ttl_s
    log.warning(
        "KV layouts incompatible, checking again: worker=%s peer=%s reason=%s retry_s=%g",
        runtime.options.name,
        _named(instance),
        reason,
        wait_s,
    )
    await asyncio.sleep(wait_s)
    incompatible = await _find_incompatible(runtime, namespace, info)
    if incompatible is None:
        return
    instance, reason = incompatible
    what, _, remedy = reason.rpartition(": ")
    raise ConfigError(
        f"the {info.role} worker {runtime.options.name} cannot exchange KV of {info.model} with the registered "
        f"{PEER_ROLES[info.role]} worker {_named(instance)}: {what}",
        key="role",
        remedy=f"{remedy}, or serve them in different namespaces",
    )


async def _find_incompatible(
    runtime: Runtime, namespace: str, info: EngineInfo
) -> tuple[Instance, str] | None:
    """A ready peer that is incompatible, and the reason. None if any peer is compatible."""
    if info.role not in PEER_ROLES or info.kv_slabs is None:
        return None
    component = component_name(info.model, PEER_ROLES[info.role], info.card)
    try:
        content = await runtime.discovery.get_prefix(EndpointAddress(namespace, component, GENERATE).prefix)
    except DiscoveryLost as error:  # serve without the check
        log.warning("KV compatibility check skipped: reason=%s", error.message)
        return None
    incompatible: tuple[Instance, str] | None = None
    for value in content.values():
        instance = decode_instance(value)
        if instance is None or instance.state is not InstanceState.READY:
            continue
        reason = find_mismatch(info.kv_slabs, slabs_of(instance))
        if reason is None:
            return None
        incompatible = incompatible or (instance, reason)
    return incompatible


def slabs_of(instance: Instance) -> KvSlabs | None:
    """KV layout of a registered worker; None also if it cannot be decoded."""
    try:
        return _decode_info(instance.info).kv_slabs
    except MALFORMED:
        return None


def _layout(slabs: KvSlabs | None) -> SlabLayout | None:
    """None also for an invalid layout, as of another version."""
    if slabs is None:
        return None
    try:
        return SlabLayout(block=slabs.block, total_kv_heads=slabs.total_kv_heads, tp_degree=slabs.tp_degree)
    except ValueError:
        return None


def _named(instance: Instance) -> str:
    return f"{instance.process or 'unnamed'} ({instance.id} at {instance.address})"
