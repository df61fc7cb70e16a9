"""Checks at registration whether workers that are to exchange KV can.

A prefill worker that fits no decode worker ends, and says why. A decode worker, which answers requests without any,
only says so: what is wrong may be at the others, and a rollout begins with the decode workers. Who misses the other,
since both register in one moment or discovery is away, is told apart by frontends (`frontend.kv_pairs`).
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvolt.core.card import EngineInfo, KvSlabs
from kvolt.core.endpoints import GENERATE, component_name
from kvolt.core.errors import ConfigError, DiscoveryLost, Unsupported
from kvolt.core.request import Role
from kvolt.engines.contract import Engine, KvPlaced
from kvolt.runtime.endpoint.address import EndpointAddress, Instance, InstanceState, decode_instance
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.runtime import Runtime
from kvolt.transfer.memory.layout import SlabLayout, why_incompatible

log = logging.getLogger(__name__)

PEERS = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
"""Which role exchanges KV with which."""

_LEASES = 1.5
"""After so many times its lease a worker that was lost is registered no more."""

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


def with_slabs(info: EngineInfo, engine: Engine) -> EngineInfo:
    """With how its blocks lie, if it is to exchange them and they lie where others reach them."""
    if info.role not in PEERS or "KvPlaced" not in info.features or not isinstance(engine, KvPlaced):
        return info
    try:
        layout = engine.kv_slabs()[0].layout
    except Unsupported:
        return info
    if layout is None:
        return info
    slabs = KvSlabs(block=layout.block, total_kv_heads=layout.total_kv_heads, tp_degree=layout.tp_degree)
    return msgspec.structs.replace(info, kv_slabs=slabs)


def why_unfit(mine: KvSlabs | None, theirs: KvSlabs | None) -> str | None:
    """Why two workers cannot exchange KV, with the remedy; None where they can, or do not say how their blocks lie."""
    ours, others = _layout(mine), _layout(theirs)
    return None if ours is None or others is None else why_incompatible(ours, others)


async def check_peers(runtime: Runtime, namespace: str, info: EngineInfo) -> None:
    """ConfigError for a prefill worker that could exchange KV with none of the decode workers that are registered for
    the same model and card. One that was lost may be registered still: that is waited for."""
    found = await _misfit(runtime, namespace, info)
    if found is None:
        return
    instance, reason = found
    if info.role is Role.DECODE:
        log.error(
            "%s cannot exchange KV with %s, and computes such prompts itself: %s",
            runtime.options.name,
            _named(instance),
            reason,
        )
        return
    wait_s = _LEASES * runtime.options.lease_ttl_s
    log.warning(
        "%s cannot exchange KV with %s: %s; looking again in %g s, if that one was only lost",
        runtime.options.name,
        _named(instance),
        reason,
        wait_s,
    )
    await asyncio.sleep(wait_s)
    found = await _misfit(runtime, namespace, info)
    if found is None:
        return
    instance, reason = found
    what, _, remedy = reason.rpartition(": ")
    raise ConfigError(
        f"the {info.role} worker {runtime.options.name} cannot exchange KV of {info.model} with the registered "
        f"{PEERS[info.role]} worker {_named(instance)}: {what}",
        key="role",
        remedy=f"{remedy}, or serve them in different namespaces",
    )


async def _misfit(runtime: Runtime, namespace: str, info: EngineInfo) -> tuple[Instance, str] | None:
    """One that wants requests and does not fit, and why; None where any of them does."""
    if info.role not in PEERS or info.kv_slabs is None:
        return None
    component = component_name(info.model, PEERS[info.role], info.card)
    try:
        content = await runtime.discovery.get_prefix(EndpointAddress(namespace, component, GENERATE).prefix)
    except DiscoveryLost as error:  # to serve is worth more than to know
        log.warning("whether KV can be exchanged with other workers is not known yet: %s", error.message)
        return None
    misfit: tuple[Instance, str] | None = None
    for value in content.values():
        instance = decode_instance(value)
        if instance is None or instance.state is not InstanceState.READY:
            continue
        reason = why_unfit(info.kv_slabs, slabs_of(instance))
        if reason is None:
            return None
        misfit = misfit or (instance, reason)
    return misfit


def slabs_of(instance: Instance) -> KvSlabs | None:
    """As it has registered; None also for what this version does not understand."""
    try:
        return _decode_info(instance.info).kv_slabs
    except MALFORMED:
        return None


def _layout(slabs: KvSlabs | None) -> SlabLayout | None:
    """None also for what is no layout: another version may have others."""
    if slabs is None:
        return None
    try:
        return SlabLayout(block=slabs.block, total_kv_heads=slabs.total_kv_heads, tp_degree=slabs.tp_degree)
    except ValueError:
        return None


def _named(instance: Instance) -> str:
    return f"{instance.process or 'without a name'} ({instance.id} at {instance.address})"
