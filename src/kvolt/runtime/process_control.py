"""Status and control of a process: messages of the two endpoints, and the operations behind the control verbs."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import msgspec

from kvolt.core.endpoints import InstanceState
from kvolt.core.errors import KvoltError, Unsupported

STATUS_ENDPOINT = "kvolt.process.status"
CONTROL_ENDPOINT = "kvolt.process.control"
EVENTS_ENDPOINT = "kvolt.process.events"
"""Served by every process at its address, without registration; `events` with a cluster key only."""

MAX_CONTROL_S = 86_400.0
"""Maximum time that a process may take to drain."""
_COMMAND_OWNERS = {
    "clear_kv_blocks": "a frontend or a worker",
    "resize_kv_tiers": "a worker",
    "explain_route": "a frontend",
    "sleep": "a worker, or `kvolt worker sleep`",
    "wake_up": "a worker, or `kvolt worker wake`",
    "load_lora_adapter": "a frontend",
    "unload_lora_adapter": "a frontend",
}
"""Processes that have a command of `admin.COMMANDS`, for the error of others."""


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


class Controls(Protocol):
    """Operations that an operator can apply to this process.

    Calls run in the request's task. A client that disconnects cancels them, and `drain` must then leave the process
    cordoned.
    """

    async def cordon(self) -> None:
        """Refuse new work; running work continues."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Cordon, then wait until no work is running or the time-out expires."""
        ...

    async def resume(self) -> None:
        """Accept work again."""
        ...

    async def command(self, name: str, body: bytes) -> Any:
        """Run one of `admin.COMMANDS`, here or on all known workers.

        Raises Unsupported if this process does not have it.
        """
        ...

    async def status(self) -> Any:
        """Return the status; it must encode to JSON."""
        ...


async def execute(request: ControlRequest, controls: Controls) -> None:
    """Apply the verb of a control request to this process."""
    match request.verb:
        case "cordon":
            await controls.cordon()
        case "drain":
            await controls.drain(request.timeout_s)
        case "resume":
            await controls.resume()
        case "sleep" | "wake_up" as name:
            options = {"timeout_s": request.timeout_s} if name == "sleep" else {}
            await controls.command(name, msgspec.json.encode(options))
        case _:
            raise KvoltError(f"unknown verb {request.verb!r}; known: cordon, drain, resume, sleep, wake_up")


def unsupported_command(name: str) -> Unsupported:
    """Error for a command of `admin.COMMANDS` that this process does not have."""
    return Unsupported(
        f"this process does not support {name}; use the admin port of {_COMMAND_OWNERS[name]}", feature=name
    )
