"""Messages of a process's status and control endpoints."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvolt.core.endpoints import InstanceState

STATUS_ENDPOINT = "kvolt.process.status"
CONTROL_ENDPOINT = "kvolt.process.control"
"""Served by every process at its address, without registration."""

MAX_CONTROL_S = 86_400.0
"""Maximum time that a process may take to drain."""


class EndpointStatus(msgspec.Struct, frozen=True):
    endpoint: str
    instance: str
    state: InstanceState
    """`draining` also while the supervisor stops: until its turn, the process serves the requests that remain."""
    active_streams: int


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a process as shown by `kvolt status`."""

    name: str
    address: str
    uptime_s: float
    connections: int
    calls_open: int
    endpoints: tuple[EndpointStatus, ...]
    pid: int | None = None
    """Process id, on the machine of the process."""
    supervisor_pid: int | None = None
    """Process id of the `kvolt serve` that started it; a SIGTERM to that one stops all its processes."""
    details: dict[str, Any] = {}
    """Component details: for a worker, role and load."""


class ControlRequest(msgspec.Struct, frozen=True):
    verb: str
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_CONTROL_S)] = 30.0
