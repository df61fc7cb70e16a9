"""Calling an endpoint: which instances there are, which can be reached, and a stream to one of them.

An instance whose connection fails is out of the candidate set at once, whatever discovery says, and
comes back when it can be reached again: a task dials it in the background, so that no request is
spent on finding out.

An instance that is silent while its connection stays open may be stalled. It is out of the candidate set, too, but
calls to it go on; they end if, a moment later, another instance could take them over.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from kvolt.core.errors import (
    ConnectFailed,
    DeadlineExceeded,
    InvalidRequest,
    KvoltError,
    NetworkFault,
    Unavailable,
)
from kvolt.core.ids import InstanceId
from kvolt.runtime.discovery.port import Delete, Discovery, Put
from kvolt.runtime.endpoint.address import EndpointAddress, Instance, InstanceState, decode_instance
from kvolt.runtime.endpoint.call import Call, Deadlines, ResponseStream
from kvolt.runtime.logs import current_context
from kvolt.runtime.plane.port import Destination, RequestPlane
from kvolt.runtime.plane.streams import Decode, Sink
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_TIMER_GRAIN_S = 0.002
"""How much too early a timer of the loop may fire."""

_REDIAL_FIRST_S = 0.1
_REDIAL_MAX_S = 2.0

_REGISTER_S = 5.0
"""For an instance that was stalled to register again, or for one whose registration ended to turn out to be stalled:
longer than a silent connection takes to be noticed."""

_TAKE_OVER_AFTER_S = 1.0
"""From the silence of an instance until its calls end for another one's: instances that stall together, as on one
machine, do not come back in the same instant. Nor do they fall silent in the same: see `_drop_silent`."""

_encode = msgspec.msgpack.Encoder().encode
_decode_any: Decode = msgspec.msgpack.Decoder().decode


def _encode_request(request: Any) -> bytes:
    try:
        return _encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the request cannot be encoded: {error}", param="body") from error


async def open_call(
    plane: RequestPlane,
    to: Destination,
    request: Any,
    call: Call,
    decode: Decode,
) -> None:
    """Open a stream for a call. When it raises, nothing was sent and the call is over.

    DeadlineExceeded when the whole call's time ended first: that says nothing of the peer.
    """
    try:
        body = _encode_request(request)
        remaining_s = call.remaining_s
        stream = await plane.open(
            to,
            body,
            call,
            decode,
            connect_s=min(call.deadlines.connect_s, remaining_s),
            deadline_s=remaining_s,
            context=current_context(),
            automatic_credit=call.automatic_credit,
        )
    except BaseException as error:
        call.abandon()
        if isinstance(error, ConnectFailed) and call.remaining_s <= _TIMER_GRAIN_S:
            total_s = call.deadlines.total_s
            raise DeadlineExceeded(
                f"no connection within {total_s:g} s (total)", stage="total", after_s=total_s
            ) from error
        raise
    call.attach(stream)


async def open_stream(
    plane: RequestPlane, to: Destination, request: Any, limits: Deadlines, decode: Decode = _decode_any
) -> ResponseStream:
    """Call a known process directly."""
    responses = ResponseStream(limits)
    await open_call(plane, to, request, responses.call, decode)
    return responses


class EndpointClient:
    """Live view of one endpoint's instances, and calls to them.

    `start` before use; `close` ends the watching, not the calls.
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
        """How long requests wait while no instance can be reached."""
        self.may_move = True
        """Calls to a silent instance end when another could take them over; else they are kept for the whole grace."""
        self.has_fallback = False
        """Callers have another way than these instances: calls to a silent one end whether or not there are others."""
        self._plane = plane
        self._rng = rng
        self._discovery = discovery
        self._deadlines = deadlines or Deadlines()
        self._instances: dict[InstanceId, Instance] = {}
        self._unreachable: dict[InstanceId, KvoltError] = {}
        self._silent: dict[str, None] = {}
        """Addresses that may be stalled: their calls go on."""
        self._expired: dict[InstanceId, Instance] = {}
        """Of silent addresses, without a registration: a stall may outlast a lease."""
        self._returning: dict[InstanceId, tuple[Instance, float]] = {}
        """Without a registration and not known to be silent, and until when they may register again: those whose
        silence ended, and those that went without draining. We may hear of an expired lease first, and of the
        silence later, if we were stalled ourselves."""
        self._lost_all_at: float | None = None
        """When the last instance was lost, as far as it was not draining."""
        self._take_over: asyncio.TimerHandle | None = None
        self._candidates: list[Instance] | None = None
        """Worked out once per change, not once per request."""
        self._crew = Crew(f"client {endpoint}")
        self._turn = 0
        self._synced = asyncio.Event()
        self._changed: list[Callable[[], None]] = []
        self._change = asyncio.Event()
        for address in static:
            instance_id = InstanceId(f"static-{address}")
            self._instances[instance_id] = Instance(id=instance_id, endpoint=endpoint, address=address)
        self._static = frozenset(self._instances)
        plane.on_closed(self._on_peer_lost)
        plane.on_silent(self._on_silent)

    async def start(self) -> None:
        if self._discovery is not None:
            self._crew.start(self._watch(self._discovery), "watch")
        else:
            self._synced.set()

    async def wait_synced(self, timeout_s: float) -> None:
        """Wait for discovery's first answer, or give up quietly: what is not known yet will come."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._synced.wait()
        except TimeoutError:
            log.warning("discovery has not answered within %g s; going on without", timeout_s)

    async def close(self) -> None:
        self._plane.forget(self._on_peer_lost, self._on_silent)
        self._stop_timer()
        await self._crew.close()

    @property
    def closed(self) -> bool:
        return self._crew.closed

    @property
    def plane(self) -> RequestPlane:
        """For who has more to say to an instance than this endpoint takes."""
        return self._plane

    # --- instances

    def instances(self) -> list[Instance]:
        """All that are registered, reachable or not, in order of id."""
        return [self._instances[instance_id] for instance_id in sorted(self._instances)]

    def candidates(self) -> list[Instance]:
        """Those that want requests and can be reached as far as we know, in order of id."""
        if self._candidates is None:
            self._candidates = [
                instance
                for instance in self.instances()
                if instance.state is InstanceState.READY and instance.id not in self._unreachable
            ]
        return self._candidates

    def awaited(self) -> frozenset[InstanceId]:
        """Those that want requests, cannot be reached now, and may come back: redialed, or stalled."""
        unreachable = [
            instance_id
            for instance_id in self._unreachable
            if (instance := self._instances.get(instance_id)) is not None
            and instance.state is InstanceState.READY
        ]
        self._prune_returning()
        return frozenset([*unreachable, *self._expired, *self._returning])

    @property
    def awaits_replacement(self) -> bool:
        """No instance is left, the last one was lost, and a supervisor may still be starting another one."""
        if self._instances or self._lost_all_at is None:
            return False
        return asyncio.get_running_loop().time() < self._lost_all_at + self.stall_grace_s

    async def wait_change(self, timeout_s: float) -> None:
        """Until the set of candidates, or of those awaited, may have changed, or the time is over."""
        self._prune_returning()
        now = asyncio.get_running_loop().time()
        timeout_s = min([timeout_s, *(until - now for _, until in self._returning.values())])
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._change.wait()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Be told when the set of candidates may have changed."""
        self._changed.append(listener)

    def round_robin(self) -> Instance:
        candidates = self._some_candidates()
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def random(self) -> Instance:
        candidates = self._some_candidates()
        return candidates[self._rng.randrange(len(candidates))]

    def instance(self, instance_id: InstanceId) -> Instance:
        """A certain one; Unavailable when it is not registered."""
        found = self._instances.get(instance_id)
        if found is None:
            raise Unavailable(
                f"{self.endpoint} has no instance {instance_id}",
                endpoint=str(self.endpoint),
                reason="unknown_instance",
            )
        return found

    def is_registered(self, instance_id: InstanceId) -> bool:
        return instance_id in self._instances

    def _some_candidates(self) -> list[Instance]:
        candidates = self.candidates()
        if not candidates:
            reason = "no_instances" if not self._instances else "none_reachable"
            raise Unavailable(
                f"no instance of {self.endpoint} can be reached", endpoint=str(self.endpoint), reason=reason
            )
        return candidates

    # --- calls

    async def stream(
        self,
        request: Any,
        instance: Instance | None = None,
        deadlines: Deadlines | None = None,
        decode: Decode = _decode_any,
    ) -> ResponseStream:
        """Call an instance (round-robin when none is given); the answers come from the stream returned.

        ConnectFailed: nothing was sent. Once it returns, errors come out of the stream.
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
        decode: Decode = _decode_any,
    ) -> Call:
        """As `stream`, but the answers go to a sink as they arrive, without a task switch.

        An item counts as read when the sink has it; a sink that falls behind says so by `Call.stream.hold`.
        """
        call = Call(sink, deadlines or self._deadlines, automatic_credit=True)
        await self._open(request, instance, decode, call)
        return call

    async def _open(self, request: Any, instance: Instance | None, decode: Decode, call: Call) -> None:
        try:
            chosen = instance or self.round_robin()
        except BaseException:
            call.abandon()
            raise
        target = str(self.endpoint) if chosen.id in self._static else chosen.target
        try:
            await open_call(self._plane, Destination(chosen.address, target), request, call, decode)
        except NetworkFault as error:
            self._mark_unreachable(chosen.id, error)
            raise

    # --- reachability

    def _on_peer_lost(self, address: str, reason: KvoltError) -> None:
        self._end_silence(address)
        if self._take_returning(address):
            self._tell_changed()
        for instance in self.instances():
            if instance.address == address:
                self._mark_unreachable(instance.id, reason)

    def _on_silent(self, address: str, is_silent: bool) -> None:
        here = [instance for instance in self.instances() if instance.address == address]
        expired = self._take_returning(address) if is_silent else []
        if is_silent and (here or expired):
            self._silent[address] = None
            self._expired.update((instance.id, instance) for instance in expired)
            reason = Unavailable(f"{address} is silent", endpoint=str(self.endpoint), reason="silent")
            for instance in here:
                self._mark_unreachable(instance.id, reason)
            self._set_timer()
        elif not is_silent:
            self._expect_registrations(address)
            self._end_silence(address)
            for instance in here:
                self._mark_reachable(instance.id)

    def _expect_registrations(self, address: str) -> None:
        for instance in self._expired.values():
            if instance.address == address:
                self._expect_registration(instance)

    def _expect_registration(self, instance: Instance) -> None:
        self._prune_returning()
        self._returning[instance.id] = (instance, asyncio.get_running_loop().time() + _REGISTER_S)

    def _prune_returning(self) -> None:
        now = asyncio.get_running_loop().time()
        self._returning = {key: each for key, each in self._returning.items() if now < each[1]}

    def _take_returning(self, address: str) -> list[Instance]:
        """Those at the address, which are no longer counted among the returning."""
        taken = [instance for instance, _ in self._returning.values() if instance.address == address]
        for instance in taken:
            del self._returning[instance.id]
        return taken

    def _end_silence(self, address: str) -> None:
        self._silent.pop(address, None)
        kept = {key: each for key, each in self._expired.items() if each.address != address}
        if len(kept) != len(self._expired):
            self._expired = kept
            self._tell_changed()

    def _set_timer(self) -> None:
        """After every change: an instance may have come that can take over calls to a silent one."""
        if self._silent and self._take_over is None and not self._crew.closed:
            loop = asyncio.get_running_loop()
            self._take_over = loop.call_later(_TAKE_OVER_AFTER_S, self._drop_silent)

    def _stop_timer(self) -> None:
        if self._take_over is not None:
            self._take_over.cancel()
            self._take_over = None

    def _drop_silent(self) -> None:
        """Unless the others may be stalled as well, and not silent for long enough to be known for it: later, then."""
        self._take_over = None
        others = self.candidates() if self.may_move else []
        if self.has_fallback or any(self._plane.is_heard(each.address) for each in others):
            for address in list(self._silent):
                self._plane.drop_silent(address)
        elif others:
            self._set_timer()

    def _mark_unreachable(self, instance_id: InstanceId, reason: KvoltError) -> None:
        if instance_id in self._instances and instance_id not in self._unreachable:
            self._unreachable[instance_id] = reason
            self._tell_changed()
            if not self._crew.closed:
                self._crew.start(self._redial(instance_id, reason), f"redial {instance_id}")

    def _mark_reachable(self, instance_id: InstanceId) -> None:
        if self._unreachable.pop(instance_id, None) is not None:
            self._tell_changed()

    async def _redial(self, instance_id: InstanceId, reason: KvoltError) -> None:
        """Try to reach an instance until it answers or is no longer registered."""
        pause_s = _REDIAL_FIRST_S
        while (instance := self._instances.get(instance_id)) is not None:
            await asyncio.sleep(pause_s * self._rng.uniform(0.75, 1.25))
            if self._unreachable.get(instance_id) is not reason:
                return  # it answers again by itself
            try:
                await self._plane.reach(instance.address, self._deadlines.connect_s)
            except NetworkFault:
                pause_s = min(pause_s * 2, _REDIAL_MAX_S)
                continue
            break
        if self._unreachable.get(instance_id) is reason:
            self._mark_reachable(instance_id)

    # --- discovery

    async def _watch(self, discovery: Discovery) -> None:
        async for event in discovery.watch_prefix(self.endpoint.prefix):
            if isinstance(event, Put):
                instance = decode_instance(event.value)
                if instance is None:
                    log.warning("%s is not an instance that this version understands", event.key)
                    continue
                self._instances[instance.id] = instance
                self._expired.pop(instance.id, None)
                self._returning.pop(instance.id, None)
                self._tell_changed()
            elif isinstance(event, Delete):
                instance_id = InstanceId(event.key.rsplit("/", 1)[-1])
                gone = None if instance_id in self._static else self._instances.pop(instance_id, None)
                if gone is not None:
                    if gone.address in self._silent:
                        self._expired[instance_id] = gone
                    elif gone.state is InstanceState.READY and instance_id not in self._unreachable:
                        self._expect_registration(gone)
                    if not self._instances and gone.state is InstanceState.READY:
                        self._lost_all_at = asyncio.get_running_loop().time()
                    self._tell_changed()
            else:
                self._synced.set()

    def _tell_changed(self) -> None:
        self._candidates = None
        self._change.set()
        self._change = asyncio.Event()
        self._set_timer()
        for listener in self._changed:
            listener()
