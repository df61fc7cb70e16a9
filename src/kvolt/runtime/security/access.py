"""Access of roles: which endpoints a role may call and serve, and which discovery keys it may register. Pure.

Frontends, routers and operators' commands may do everything. A machine that runs workers is trusted least: it can call
and register what workers need, and nothing that attracts prompts or controls other processes.
"""

from __future__ import annotations

from kvolt.core.endpoints import (
    CARD,
    CONTROL,
    EVENT_PUBLISHERS,
    GENERATE,
    INSTANCES,
    KV,
    KV_POOL,
    KV_TOPIC,
    LOAD_TOPIC,
    decode_instance,
    decode_publisher,
)
from kvolt.core.errors import AccessDenied
from kvolt.runtime.process_control import CONTROL_ENDPOINT, EVENTS_ENDPOINT, STATUS_ENDPOINT
from kvolt.runtime.security.identity import Identity, ProcessRole

DISCOVERY_ENDPOINTS = "kvolt.discovery."
"""Prefix of the endpoints of a join server."""
_LIMITED = (ProcessRole.WORKER, ProcessRole.POOL)


def check_call(identity: Identity, endpoint: str) -> None:
    """Raise AccessDenied unless a process with this identity may call the endpoint."""
    if identity.role not in _LIMITED or endpoint == STATUS_ENDPOINT:
        return
    if endpoint.startswith(DISCOVERY_ENDPOINTS):
        return
    if [*endpoint.split(".", 2), "", ""][2] != KV:
        raise AccessDenied(f"a {identity.role} may not call {endpoint[:200]}", role=identity.role.value)


def may_serve(identity: Identity, endpoint: str) -> bool:
    """Whether a process with this identity may serve the endpoint.

    Callers check it: an address may be that of a frontend or router, and its answer from a worker.
    """
    if identity.role not in _LIMITED or endpoint in (
        STATUS_ENDPOINT,
        CONTROL_ENDPOINT,
        EVENTS_ENDPOINT,
    ):
        return True
    _, component, name = [*endpoint.split(".", 2), "", ""][:3]
    if identity.role is ProcessRole.POOL:
        return component == KV_POOL and name == CONTROL
    return component != KV_POOL and name in (GENERATE, CARD, CONTROL, KV)


def may_publish(identity: Identity, topic: str) -> bool:
    """Whether subscribers accept events of the topic from a process with this identity."""
    return identity.role not in _LIMITED or topic in (KV_TOPIC, LOAD_TOPIC)


def may_control(identity: Identity | None) -> bool:
    """Whether a client of an admin port that other machines reach may change a process or see its status."""
    return identity is not None and identity.role not in _LIMITED


def check_registration(identity: Identity, key: str, value: bytes) -> None:
    """Raise AccessDenied unless a process with this identity may register the discovery key with this value."""
    if identity.role not in _LIMITED:
        return
    if key.startswith(EVENT_PUBLISHERS):
        registration = decode_publisher(value)
        if registration is None or registration.identity != identity.uri:
            raise AccessDenied(
                f"the value of {key[:200]} describes another process", role=identity.role.value
            )
        return
    if not key.startswith(INSTANCES):
        raise AccessDenied(f"a {identity.role} may not register {key[:200]}", role=identity.role.value)
    _, component, name = [*key.removeprefix(INSTANCES).split("/"), "", "", ""][:3]
    if identity.role is ProcessRole.POOL:
        allowed = component == KV_POOL and name == CONTROL
    else:
        allowed = component != KV_POOL and name in (GENERATE, CARD)
    if not allowed:
        raise AccessDenied(f"a {identity.role} may not register {key[:200]}", role=identity.role.value)
    # Readers use the value, so it must not describe another instance or endpoint than the key.
    instance = decode_instance(value)
    if instance is None or instance.key != key or instance.identity != identity.uri:
        raise AccessDenied(f"the value of {key[:200]} describes another instance", role=identity.role.value)
