"""Client side of an endpoint: the set of instances, their reachability, and calls to them.

An instance whose connection fails leaves the candidate set at once, whatever discovery says. A background
task redials it and puts it back when it answers, so no request is spent on probing.

An instance that is silent while its connection stays open may be stalled. It also leaves the candidate set, but
its calls continue. They end shortly afterwards if another instance can take them over.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvolt.core.endpoints import EndpointAddress, Instance, InstanceState, decode_instance
from kvolt.core.errors import KvoltError, NetworkFault, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.runtime.discovery.port import Delete, Discovery, Put
from kvolt.runtime.endpoint.absent import AbsentInstances
from kvolt.runtime.endpoint.call import Call, Deadlines, ResponseStream, decode_any, open_call
from kvolt.runtime.plane.port import Destination, RequestPlane
from kvolt.runtime.plane.streams import Decode, Sink
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_REDIAL_FIRST_S = 0.1
_REDIAL_MAX_S = 2.0

_REGISTER_S = 5.0
"""Time allowed for a stalled instance to register again, and for an instance whose registration expired to be
recognised as stalled. Longer than it takes to detect a silent connection."""

_REFUSED_S = 1.0
"""A dial that fails sooner was refused; a longer one got no answer."""

_FAILOVER_DELAY_S = 1.0
"""Delay between the silence of an instance and moving its calls: instances that stall together (same machine) recover
at slightly different times. They also fall silent at different times: see `_fail_over_silent`."""


class EndpointClient:
    """Live view of one endpoint's instances, and calls to them.

    `start` before use; `close` ends the watch, not the calls.
    """

    def __init__(
        self,
        endpoint: EndpointAddress,
        plane: RequestPlane,
        rng: random.Random,
        discovery: Discovery | None = None,
        static: Sequence[str] = (),
        deadlines: Deadlines | None = None,
        stall_grace_s: float = 30.0,
    ) -> None:
        self.endpoint = endpoint
        self.stall_grace_s = stall_grace_s
        """How long requests wait while no instance is reachable."""
        self.may_migrate = True
        """End calls to a silent instance when another can take them over; otherwise keep them for `stall_grace_s`."""
        self.has_fallback = False
        """Callers have an alternative to these instances: calls to a silent one end even if it is the only one."""
        self._plane = plane
        self._rng = rng
        self._discovery = discovery
        self._deadlines = deadlines or Deadlines()
        self._instances: dict[InstanceId, Instance] = {}
        self._unreachable: dict[InstanceId, KvoltError] = {}
        self._silent: dict[str, None] = {}
        """Addresses that may be stalled; their calls continue."""
        self._expired: dict[InstanceId, Instance] = {}
        """Instances at silent addresses whose registration expired: a stall may outlast a lease."""
        self._absent = AbsentInstances(lambda: asyncio.get_running_loop().time())
        """Unregistered instances that are not known to be silent: their silence ended, or they vanished without
        draining."""
        self._lost_all_at: float | None = None
        """When the last instance vanished without draining."""
        self._failover_timer: asyncio.TimerHandle | None = None
        self._candidates: list[Instance] | None = None
        """Cached until the next change."""
        self._task_group = TaskGroup(f"client {endpoint}")
        self._turn = 0
        self._synced = asyncio.Event()
        self._change_listeners: list[Callable[[], None]] = []
        self._change_event = asyncio.Event()
        for address in static:
            instance_id = InstanceId(f"static-{address}")
            self._instances[instance_id] = Instance(id=instance_id, endpoint=endpoint, address=address)
        self._static = frozenset(self._instances)
        plane.on_closed(self._on_peer_lost)
        plane.on_silent(self._on_silent)

    async def start(self) -> None:
        if self._discovery is not None:
            self._task_group.start(self._watch(self._discovery), "watch")
        else:
            self._synced.set()

    async def wait_synced(self, timeout_s: float) -> None:
        """Wait for the initial discovery snapshot. On time-out logs a warning and returns; instances appear later."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._synced.wait()
        except TimeoutError:
            log.warning("discovery snapshot not received: waited=%g s; continuing without it", timeout_s)

    async def close(self) -> None:
        self._plane.remove_listeners(self._on_peer_lost, self._on_silent)
        self._cancel_failover()
        await self._task_group.close()

    @property
    def closed(self) -> bool:
        return self._task_group.closed

    @property
    def plane(self) -> RequestPlane:
        """For calls to an instance beyond this endpoint."""
        return self._plane

    # --- instances

    def instances(self) -> list[Instance]:
        """All registered instances, reachable or not, sorted by id."""
        return [self._instances[instance_id] for instance_id in sorted(self._instances)]

    def candidates(self) -> list[Instance]:
        """Ready and reachable instances, sorted by id."""
        if self._candidates is None:
            self._candidates = [
                instance
                for instance in self.instances()
                if instance.state is InstanceState.READY and instance.id not in self._unreachable
            ]
        return self._candidates

    def recovering(self) -> frozenset[InstanceId]:
        """Ready instances that are unreachable now and may recover: being redialed, or stalled."""
        unreachable = [
            instance_id
            for instance_id in self._unreachable
            if (instance := self._instances.get(instance_id)) is not None
            and instance.state is InstanceState.READY
        ]
        return frozenset([*unreachable, *self._expired, *self._absent.ids()])

    @property
    def awaits_replacement(self) -> bool:
        """No instance is left, the last one was lost, and a supervisor may still be restarting it."""
        if self._instances or self._lost_all_at is None:
            return False
        return asyncio.get_running_loop().time() < self._lost_all_at + self.stall_grace_s

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until the candidates or the recovering instances may have changed, or until the time-out."""
        timeout_s = min([timeout_s, *self._absent.waits_s()])
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._change_event.wait()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the candidate set may have changed."""
        self._change_listeners.append(listener)

    def pick_round_robin(self) -> Instance:
        candidates = self.candidates()
        if not candidates:
            reason = "none_reachable" if self._instances else "no_instances"
            raise Unavailable(
                f"no instance of {self.endpoint} can be reached", endpoint=str(self.endpoint), reason=reason
            )
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def get_instance(self, instance_id: InstanceId) -> Instance:
        """The instance with this id. Raises Unavailable when it is not registered."""
        instance = self._instances.get(instance_id)
        if instance is None:
            raise Unavailable(
                f"{self.endpoint} has no instance {instance_id}",
                endpoint=str(self.endpoint),
                reason="unknown_instance",
            )
        return instance

    def is_registered(self, instance_id: InstanceId) -> bool:
        return instance_id in self._instances

    # --- calls

    async def stream(
        self,
        request: Any,
        instance: Instance | None = None,
        deadlines: Deadlines | None = None,
        decode: Decode = decode_any,
    ) -> ResponseStream:
        """Call an instance (default: round-robin); responses come from the returned stream.

        ConnectFailed means that nothing was sent. After it returns, errors come from the stream.
        """
        responses = ResponseStream(deadlines or self._deadlines)
        await self._open(request, instance, decode, responses.call)
        return responses

    async def call(
        self,
        request: Any,
        sink: Sink,
        instance: Instance | None = None,
        deadlines: Deadlines | None = None,
        decode: Decode = decode_any,
    ) -> Call:
        """Like `stream`, but responses go to a sink as they arrive, without a task switch.

        An item counts as read once the sink has it; a sink that falls behind calls `Call.stream.pause_reading`.
        """
        call = Call(sink, deadlines or self._deadlines, automatic_credit=True)
        await self._open(request, instance, decode, call)
        return call

    async def _open(self, request: Any, instance: Instance | None, decode: Decode, call: Call) -> None:
        try:
            chosen = instance or self.pick_round_robin()
        except BaseException:
            call.abandon()
            raise
        target = str(self.endpoint) if chosen.id in self._static else chosen.target
        try:
            to = Destination(chosen.address, target, chosen.identity)
            await open_call(self._plane, to, request, call, decode)
        except NetworkFault as error:
            self._mark_unreachable(chosen.id, error)
            raise

    # --- reachability

    def _on_peer_lost(self, address: str, reason: KvoltError) -> None:
        self._end_silence(address)
        if self._absent.pop_at(address):
            self._notify_changed()
        for instance in self.instances():
            if instance.address == address:
                self._mark_unreachable(instance.id, reason)

    def _on_silent(self, address: str, is_silent: bool) -> None:
        registered = [instance for instance in self.instances() if instance.address == address]
        expired = self._absent.pop_at(address) if is_silent else []
        if is_silent and (registered or expired):
            self._silent[address] = None
            self._expired.update((instance.id, instance) for instance in expired)
            reason = Unavailable(f"{address} is silent", endpoint=str(self.endpoint), reason="silent")
            for instance in registered:
                self._mark_unreachable(instance.id, reason)
            self._arm_failover()
        elif not is_silent:
            self._expect_registrations(address)
            self._end_silence(address)
            for instance in registered:
                self._mark_reachable(instance.id)

    def _expect_registrations(self, address: str) -> None:
        for instance in self._expired.values():
            if instance.address == address:
                self._absent.expect(instance, _REGISTER_S)

    def _end_silence(self, address: str) -> None:
        self._silent.pop(address, None)
        remaining = {key: each for key, each in self._expired.items() if each.address != address}
        if len(remaining) != len(self._expired):
            self._expired = remaining
            self._notify_changed()

    def _arm_failover(self) -> None:
        """Called after every change: a new instance may be able to take over calls to a silent one."""
        if self._silent and self._failover_timer is None and not self._task_group.closed:
            loop = asyncio.get_running_loop()
            self._failover_timer = loop.call_later(_FAILOVER_DELAY_S, self._fail_over_silent)

    def _cancel_failover(self) -> None:
        if self._failover_timer is not None:
            self._failover_timer.cancel()
            self._failover_timer = None

    def _fail_over_silent(self) -> None:
        """Move the calls of silent instances, or retry later while the other candidates may be stalled as well."""
        self._failover_timer = None
        alternatives = self.candidates() if self.may_migrate else []
        if self.has_fallback or any(self._plane.is_responsive(each.address) for each in alternatives):
            for address in list(self._silent):
                self._plane.close_silent(address)
        elif alternatives:
            self._arm_failover()

    def _mark_unreachable(self, instance_id: InstanceId, reason: KvoltError) -> None:
        if instance_id in self._instances and instance_id not in self._unreachable:
            self._unreachable[instance_id] = reason
            self._notify_changed()
            if not self._task_group.closed:
                self._task_group.start(self._redial(instance_id, reason), f"redial {instance_id}")

    def _mark_reachable(self, instance_id: InstanceId) -> None:
        if self._unreachable.pop(instance_id, None) is not None:
            self._notify_changed()

    async def _redial(self, instance_id: InstanceId, reason: KvoltError) -> None:
        """Dial an instance until it answers or is unregistered."""
        pause_s = _REDIAL_FIRST_S
        while (instance := self._instances.get(instance_id)) is not None:
            await asyncio.sleep(pause_s * self._rng.uniform(0.75, 1.25))
            if self._unreachable.get(instance_id) is not reason:
                return  # recovered by itself
            try:
                await self._plane.ensure_connected(instance.address, self._deadlines.connect_s)
            except NetworkFault:
                pause_s = min(pause_s * 2, _REDIAL_MAX_S)
                continue
            break
        if self._unreachable.get(instance_id) is reason:
            self._mark_reachable(instance_id)

    def _await_return(self, instance: Instance) -> None:
        """Expect an instance that vanished without draining to register again, unless it refuses connections."""
        self._absent.expect(instance, max(_REGISTER_S, self._deadlines.connect_s + _REFUSED_S))
        if not self._task_group.closed:
            self._task_group.start(self._probe_absent(instance), f"probe {instance.id}")

    async def _probe_absent(self, instance: Instance) -> None:
        """Dial an unregistered instance until it answers, refuses, or is expected no more. The system of a stalled
        process accepts connections; that of a process that ended refuses them at once."""
        loop = asyncio.get_running_loop()
        ends_at, num_refused, pause_s = loop.time() + self.stall_grace_s, 0, _REDIAL_FIRST_S
        while self._absent.is_expected(instance) and num_refused < 2:  # the first dial may have been shared
            dialed_at, is_connected = loop.time(), True
            try:
                await self._plane.ensure_connected(instance.address, self._deadlines.connect_s)
            except NetworkFault:
                is_connected = False
            if not self._absent.is_expected(instance):
                return
            if is_connected:
                self._absent.expect(instance, _REGISTER_S)
                return
            if loop.time() - dialed_at < _REFUSED_S:
                num_refused, pause_s = num_refused + 1, _REDIAL_FIRST_S
            else:
                num_refused, pause_s = 0, min(pause_s * 2, _REDIAL_MAX_S)
                self._absent.expect(instance, ends_at - loop.time())
            await asyncio.sleep(pause_s * self._rng.uniform(0.75, 1.25))
        if self._absent.is_expected(instance):
            self._absent.discard(instance.id)
            self._notify_changed()

    # --- discovery

    async def _watch(self, discovery: Discovery) -> None:
        async for event in discovery.watch_prefix(self.endpoint.prefix):
            if isinstance(event, Put):
                instance = decode_instance(event.value)
                if instance is None:
                    log.warning("instance ignored: key=%s reason=not decodable by this version", event.key)
                    continue
                self._instances[instance.id] = instance
                self._expired.pop(instance.id, None)
                self._absent.discard(instance.id)
                self._notify_changed()
            elif isinstance(event, Delete):
                instance_id = InstanceId(event.key.rsplit("/", 1)[-1])
                removed = None if instance_id in self._static else self._instances.pop(instance_id, None)
                if removed is not None:
                    if removed.address in self._silent:
                        self._expired[instance_id] = removed
                    elif removed.state is InstanceState.READY:
                        self._await_return(removed)
                    if not self._instances and removed.state is InstanceState.READY:
                        self._lost_all_at = asyncio.get_running_loop().time()
                    self._notify_changed()
            else:
                self._synced.set()

    def _notify_changed(self) -> None:
        self._candidates = None
        self._change_event.set()
        self._change_event = asyncio.Event()
        self._arm_failover()
        for listener in self._change_listeners:
            listener()
