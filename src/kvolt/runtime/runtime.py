"""A kvolt process: request plane, registrations, endpoints, clients, and graceful stop.

Composes the other modules of `runtime`; adds no mechanism of its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvolt.core.endpoints import EndpointAddress, Instance, InstanceState, encode_instance
from kvolt.core.errors import AccessDenied, ConfigError, DiscoveryLost
from kvolt.core.ids import InstanceId
from kvolt.runtime.clock import Blocking, Clock, new_id
from kvolt.runtime.discovery.port import Discovery, LeaseId
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.endpoint.registration import RegisteredKey
from kvolt.runtime.endpoint.server import EndpointServer, Handler, StreamHandler, msgpack_decoder
from kvolt.runtime.events.port import EventPlane
from kvolt.runtime.health import Health, HealthState
from kvolt.runtime.network import Network
from kvolt.runtime.plane.port import PlaneFactory, RequestPlane
from kvolt.runtime.process_control import (
    CONTROL_ENDPOINT,
    STATUS_ENDPOINT,
    ControlRequest,
    EndpointStatus,
    ProcessStatus,
    execute,
    unsupported_command,
)
from kvolt.runtime.security.credentials import Credentials
from kvolt.runtime.security.identity import Identity
from kvolt.runtime.stop import graceful_stop
from kvolt.runtime.tasks import Scope, TaskGroup

log = logging.getLogger(__name__)

Command = Callable[[bytes], Awaitable[Any]]
"""Maps a request body to a result that encodes to JSON."""

_RETRY_S = 1.0
_LEAVE_TIMEOUT_S = 2.0
"""Time limit for discovery calls on state changes and at shutdown: the store may be unreachable."""


@dataclass(slots=True)
class Ports:
    """External dependencies of a process; tests and the twin supply their own."""

    clock: Clock
    rng: random.Random
    network: Network
    blocking: Blocking
    plane: PlaneFactory
    discovery: Callable[[RequestPlane], Discovery]
    events: Callable[[Discovery, RequestPlane, EndpointServer], EventPlane]
    credentials: Credentials | None = None
    """For connections to other processes of the cluster; None without a cluster key."""
    identity: Identity | None = None
    """Identity in the certificate of this process; None without a cluster key."""


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    name: str
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    lease_ttl_s: float = 5.0
    announce_s: float = 0.1
    """Delay between publishing `cordoned` or `draining` and refusing streams, so that clients see it first."""
    start_timeout_s: float = 30.0
    deadlines: Deadlines = field(default_factory=Deadlines)
    stall_grace_s: float = 30.0
    """How long requests wait while no instance of an endpoint is reachable."""
    pid: int | None = None
    supervisor_pid: int | None = None
    """For `ProcessStatus`."""
    on_registered: Callable[[], None] = lambda: None
    """Called when an endpoint has been registered."""
    is_stopping: Callable[[], bool] = lambda: False
    """Whether the supervisor stops this process as soon as the processes that it serves have drained."""


@dataclass(slots=True)
class _Served:
    instance: Instance
    registration: RegisteredKey


class Runtime:
    """One process. Call `start`, then `serve` and `client`, then `close`."""

    def __init__(self, ports: Ports, options: ProcessOptions) -> None:
        self.ports = ports
        self.options = options
        self.health = Health()
        self.server = EndpointServer()
        self.plane = ports.plane(new_id(ports.rng), self.server.on_open)
        self.discovery = ports.discovery(self.plane)
        self.events = ports.events(self.discovery, self.plane, self.server)
        self.admin_address: str | None = None
        self.commands: dict[str, Command] = {}
        """Commands by name, registered by components that own KV or LoRA adapters."""
        self.children: list[Runtime] = []
        """Other Runtimes in the same process: cordon, drain, resume and close apply to them too."""
        self.check_can_resume: Callable[[], None] = lambda: None
        """Raises KvoltError while the process cannot accept requests, for example because its engine is asleep."""
        self._lease: LeaseId | None = None
        self._served: dict[str, _Served] = {}
        self._clients: list[EndpointClient] = []
        self._details: dict[str, Callable[[], Any]] = {}
        self._task_group = TaskGroup(options.name)
        self._started_at = ports.clock.monotonic()

    # --- lifecycle

    async def start(self) -> None:
        """Listen, and wait for discovery up to `start_timeout_s`."""
        await self.plane.listen(self.options.listen, self.options.advertise)
        for endpoint, handler, kind in (
            (STATUS_ENDPOINT, self._serve_status, Any),
            (CONTROL_ENDPOINT, self._serve_control, ControlRequest),
        ):
            self.server.register(
                endpoint, InstanceId(""), self.server.wrap_generator(handler, msgpack_decoder(kind))
            )
        if self.ports.credentials is not None:
            self._task_group.start(self.ports.credentials.keep_fresh(self.ports.blocking), "credentials")
        self._lease = await self._first_lease()
        await self.events.start()

    async def _first_lease(self) -> LeaseId:
        started = self.ports.clock.monotonic()
        logged = False
        while True:
            try:
                return await self.discovery.lease(self.options.lease_ttl_s)
            except DiscoveryLost as error:
                waited_s = self.ports.clock.monotonic() - started
                if waited_s + _RETRY_S >= self.options.start_timeout_s:
                    raise ConfigError(
                        f"discovery unreachable after {waited_s:.0f} s: {error.message}",
                        key="discovery",
                        remedy="check the address or directory, or start the process that serves it",
                    ) from error
                if not logged:
                    logged = True
                    log.warning(
                        "discovery unreachable: %s; retrying for %g s",
                        error.message,
                        self.options.start_timeout_s,
                    )
                await asyncio.sleep(_RETRY_S)

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop accepting, drain until the deadline, cancel the rest, deregister. Idempotent."""
        if self._task_group.closed:
            return
        await self._apply_to_children(lambda child: child.close(drain_s))
        if not self._served and not self.server.num_active:
            await self.abort()
            return
        await graceful_stop(self.stop_accepting, self._drain_served, self.abort, drain_s)

    async def stop_accepting(self) -> None:
        """Publish that this process drains and refuse new streams; its children continue."""
        await self._set_state(InstanceState.DRAINING)

    async def _drain_served(self) -> None:
        """Wait until no stream is active, including those of endpoints no longer registered."""
        await self.server.drain()

    async def abort(self) -> None:
        """Cancel everything and stop at once. Idempotent."""
        await self._apply_to_children(lambda child: child.abort())
        await self.plane.stop_listening()
        self.plane.go_away()
        await self.server.close()
        for client in self._clients:
            await client.close()
        for close in (self.events.close, self.discovery.close):
            try:
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await close()
            except TimeoutError:
                log.warning("discovery unreachable; exiting without deregistering")
        await self._task_group.close()
        await self.plane.close()

    # --- serving

    async def serve(
        self, endpoint: EndpointAddress, handler: Handler, request_type: Any = Any, info: Any = None
    ) -> Instance:
        """Serve and register an endpoint whose handler is an async generator per request."""
        return await self.serve_streams(
            endpoint, self.server.wrap_generator(handler, msgpack_decoder(request_type)), info
        )

    async def serve_streams(
        self, endpoint: EndpointAddress, handler: StreamHandler, info: Any = None
    ) -> Instance:
        """Serve and register an endpoint whose handler gets the raw streams."""
        assert self.plane.address is not None, "start() first"
        assert self._lease is not None
        identity = self.ports.identity
        instance = Instance(
            id=InstanceId(new_id(self.ports.rng)),
            endpoint=endpoint,
            address=self.plane.address,
            process=self.options.name,
            identity="" if identity is None else identity.uri,
            admin=self.admin_address,
            info=msgspec.Raw(msgspec.msgpack.encode(info)),
        )
        self.server.register(str(endpoint), instance.id, handler)
        registration = RegisteredKey(
            self.discovery,
            self._lease,
            instance.key,
            self._task_group,
            self.ports.rng,
            lambda missing: self._set_registered(str(endpoint), missing),
        )
        served = self._served[str(endpoint)] = _Served(instance, registration)
        try:
            await self._publish(served)
        except AccessDenied:
            del self._served[str(endpoint)]
            self.server.unregister(str(endpoint))
            raise
        self.options.on_registered()
        self.health.set(str(endpoint), HealthState.READY)
        return instance

    async def update_info(self, endpoint: EndpointAddress, info: Any) -> None:
        """Republish an endpoint's registration with new info; instance id and state stay."""
        served = self._served.get(str(endpoint))
        if served is not None:
            raw = msgspec.Raw(msgspec.msgpack.encode(info))
            served.instance = msgspec.structs.replace(served.instance, info=raw)
            await self._publish(served)

    async def stop_serving(self, endpoint: EndpointAddress) -> None:
        """Deregister an endpoint and refuse new streams; active streams continue."""
        served = self._served.pop(str(endpoint), None)
        if served is not None:
            self.server.unregister(str(endpoint))
            self.health.remove(str(endpoint))
            try:
                await served.registration.unregister()
            except DiscoveryLost as error:
                log.warning("endpoint not deregistered: endpoint=%s reason=%s", endpoint, error.message)

    def add_status_details(self, name: str, describe: Callable[[], Any]) -> None:
        """Add a section to the details of `status`."""
        self._details[name] = describe

    # --- calling

    async def client(
        self, endpoint: EndpointAddress, static: Sequence[str] = (), deadlines: Deadlines | None = None
    ) -> EndpointClient:
        """A live view of an endpoint. With static addresses discovery is not used."""
        client = EndpointClient(
            endpoint,
            self.plane,
            self.ports.rng,
            discovery=None if static else self.discovery,
            static=static,
            deadlines=deadlines or self.options.deadlines,
            stall_grace_s=self.options.stall_grace_s,
        )
        await client.start()
        self._clients = [open_client for open_client in self._clients if not open_client.closed] + [client]
        return client

    # --- process_control.Controls

    async def cordon(self) -> None:
        """Refuse new streams; active streams continue."""
        await self._apply_to_children(lambda child: child.cordon())
        await self._set_state(InstanceState.CORDONED)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new streams, then wait until none is active or the time-out."""
        await self._apply_to_children(lambda child: child.drain(timeout_s))
        await self._set_state(InstanceState.DRAINING)
        try:
            async with asyncio.timeout(timeout_s):
                await self._drain_served()
        except TimeoutError:
            pass

    async def resume(self) -> None:
        self.check_can_resume()
        await self._apply_to_children(lambda child: child.resume())
        await self._set_state(InstanceState.READY)

    async def command(self, name: str, body: bytes) -> Any:
        command = self.commands.get(name)
        if command is None:
            raise unsupported_command(name)
        return await command(body)

    async def status(self) -> ProcessStatus:
        plane = self.plane.gauges()
        is_stopping = self.options.is_stopping()
        return ProcessStatus(
            name=self.options.name,
            address=self.plane.address or "",
            uptime_s=self.ports.clock.monotonic() - self._started_at,
            connections=plane.num_open,
            calls_open=plane.num_calls,
            endpoints=tuple(
                EndpointStatus(
                    endpoint,
                    served.instance.id,
                    InstanceState.DRAINING if is_stopping else served.instance.state,
                    self.server.num_active_streams(endpoint),
                )
                for endpoint, served in self._served.items()
            ),
            pid=self.options.pid,
            supervisor_pid=self.options.supervisor_pid,
            details={name: describe() for name, describe in self._details.items()},
        )

    # ---

    async def _apply_to_children(self, operation: Callable[[Runtime], Coroutine[Any, Any, None]]) -> None:
        """Apply to all children concurrently: draining hundreds one after the other would take minutes."""
        if not self.children:
            return
        async with Scope("children") as scope:
            for number, child in enumerate(self.children):
                scope.start(operation(child), str(number))

    async def _set_state(self, state: InstanceState) -> None:
        """Publish the state, then enforce it, so that clients see it before they are refused. The last call wins."""
        ready_before = any(served.instance.state is InstanceState.READY for served in self._served.values())
        for endpoint, served in self._served.items():
            served.instance = msgspec.structs.replace(served.instance, state=state)
            self.health.set(endpoint, HealthState(state.value))
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                for served in list(self._served.values()):
                    await self._publish(served)
                if state is not InstanceState.READY and ready_before:
                    await asyncio.sleep(self.options.announce_s)
        except TimeoutError:
            log.warning("discovery unreachable; continuing without publishing: state=%s", state)
        finally:
            self._enforce_states()

    def _enforce_states(self) -> None:
        """Refuse streams of every endpoint that is not READY, after the latest state change."""
        for endpoint, served in self._served.items():
            state = served.instance.state
            self.server.set_refusal(endpoint, None if state is InstanceState.READY else state.value)

    async def _publish(self, served: _Served) -> None:
        await served.registration.publish(encode_instance(served.instance))

    def _set_registered(self, endpoint: str, missing: str | None) -> None:
        """Health check per registration: an unregistered endpoint gets no requests, so the process is not ready."""
        check = f"{endpoint} registration"
        if missing is None:
            self.health.remove(check)
        else:
            self.health.set(check, HealthState.UNHEALTHY, missing)

    async def _serve_status(self, request: Any) -> AsyncIterator[ProcessStatus]:
        yield await self.status()

    async def _serve_control(self, request: ControlRequest) -> AsyncIterator[ProcessStatus]:
        await execute(request, self)
        yield await self.status()
