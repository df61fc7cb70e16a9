"""Server side of endpoints: dispatches each incoming stream to its handler.

Two kinds of handler:

* a `StreamHandler` gets the stream and calls `send` / `end` itself. The worker uses it because one engine step responds
  on hundreds of streams at once;
* a `Handler` is an async generator over one decoded request. Each runs in its own task, paused while its
  reader is slow and cancelled when its caller gives up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from kvolt.core.errors import AccessDenied, DeadlineExceeded, KvoltError, NotFound, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.runtime.logs import bind_context, is_logged
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.plane.streams import Decode
from kvolt.runtime.security.access import check_call
from kvolt.runtime.security.identity import Identity
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

OWN_ENDPOINTS = "kvolt."
"""Prefix of the endpoints that every process serves for other processes; not counted as active work."""

StreamHandler = Callable[[IncomingStream], None]
Handler = Callable[[Any], AsyncIterator[Any]]


class EndpointServer:
    """The endpoints of this process."""

    def __init__(self) -> None:
        self._handlers: dict[str, tuple[InstanceId, StreamHandler]] = {}
        self._refusals: dict[str, str] = {}
        self._active: dict[str, int] = {}
        self._num_denied = 0
        self._idle: asyncio.Event | None = None
        self._task_group = TaskGroup("handlers")

    @property
    def num_active(self) -> int:
        """Streams being served now, except the runtime's own (status, control, discovery server)."""
        return sum(
            count for endpoint, count in self._active.items() if not endpoint.startswith(OWN_ENDPOINTS)
        )

    def num_active_streams(self, endpoint: str) -> int:
        return self._active.get(endpoint, 0)

    def register(self, endpoint: str, instance: InstanceId, handler: StreamHandler) -> None:
        if endpoint in self._handlers:
            raise KvoltError(f"{endpoint} is served by this process already")
        self._handlers[endpoint] = (instance, handler)
        self._active.setdefault(endpoint, 0)

    def unregister(self, endpoint: str) -> None:
        self._handlers.pop(endpoint, None)
        self._refusals.pop(endpoint, None)

    def set_refusal(self, endpoint: str, reason: str | None) -> None:
        """Refuse new streams of an endpoint (`cordoned`, `draining`), or accept them again with None."""
        if reason is None:
            self._refusals.pop(endpoint, None)
        else:
            self._refusals[endpoint] = reason

    def wrap_generator(self, handler: Handler, decode: Decode) -> StreamHandler:
        """Adapt a Handler to a StreamHandler."""

        def serve(stream: IncomingStream) -> None:
            _GeneratorRun(stream, handler, decode).start(self._task_group)

        return serve

    def on_open(self, stream: IncomingStream) -> None:
        """Dispatch a stream that a peer opened."""
        endpoint, _, instance_id = stream.target.partition("#")
        if stream.peer_identity is not None:  # first: other answers would tell what is served here
            try:
                check_call(stream.peer_identity, endpoint)
            except AccessDenied as error:
                self._log_denial(stream.peer_identity, endpoint)
                stream.end(error)
                return
        entry = self._handlers.get(endpoint)
        if entry is None:
            stream.end(NotFound(f"{endpoint} is not served here", kind="endpoint", name=endpoint))
            return
        instance, handler = entry
        if instance_id and instance_id != instance:
            # The process at this address was restarted; the caller has a stale registration.
            stream.end(
                Unavailable(f"instance {instance_id} is gone", endpoint=endpoint, reason="stale_instance")
            )
            return
        reason = self._refusals.get(endpoint)
        if reason is not None:
            stream.end(Unavailable(f"{endpoint} is {reason} here", endpoint=endpoint, reason=reason))
            return
        self._track(endpoint, stream)
        try:
            handler(stream)
        except KvoltError as error:
            stream.fail(error)
        except Exception as error:  # a handler's bug must not break the connection
            log.exception("handler failed: endpoint=%s", endpoint)
            stream.fail(KvoltError(f"internal error ({type(error).__name__})"))

    async def drain(self, endpoint: str | None = None) -> None:
        """Wait until no stream is active, of one endpoint or of all."""
        while self.num_active if endpoint is None else self.num_active_streams(endpoint):
            if self._idle is None:
                self._idle = asyncio.Event()
            await self._idle.wait()

    async def close(self) -> None:
        """Cancel all running handlers and wait for them."""
        await self._task_group.close()

    def _log_denial(self, peer: Identity, endpoint: str) -> None:
        self._num_denied += 1
        if is_logged(self._num_denied):
            log.warning(
                "call refused: peer=%s endpoint=%s refused=%d", peer.uri, endpoint[:200], self._num_denied
            )

    def _track(self, endpoint: str, stream: IncomingStream) -> None:
        self._active[endpoint] = self._active.get(endpoint, 0) + 1
        stream.on_closed = lambda: self._untrack(endpoint)

    def _untrack(self, endpoint: str) -> None:
        self._active[endpoint] -= 1
        if self._idle is not None:
            self._idle.set()
            self._idle = None


class _GeneratorRun:
    """One run of an async generator handler: pulls items while the stream is writable."""

    def __init__(self, stream: IncomingStream, handler: Handler, decode: Decode) -> None:
        self._stream = stream
        self._handler = handler
        self._decode = decode
        self._writable: asyncio.Event | None = None
        self._task: asyncio.Task[Any] | None = None

    def start(self, task_group: TaskGroup) -> None:
        self._stream.on_cancel = self._on_cancel
        self._stream.on_writable = self._on_writable
        self._task = task_group.start(self._run(), self._stream.target)

    async def _run(self) -> None:
        stream = self._stream
        try:
            async with asyncio.timeout(stream.deadline_s) as deadline:
                with bind_context(stream.context):
                    await self._pump(self._handler(stream.decode_body(self._decode)))
            stream.end()
        except KvoltError as error:
            stream.end(error)
        except asyncio.CancelledError:
            # Retryable: only this process stops, so another instance may continue the request.
            stream.fail(Unavailable("the server is stopping", endpoint=stream.target, reason="stopping"))
            raise
        except Exception as error:  # the task boundary of a user's handler
            if isinstance(error, TimeoutError) and deadline.expired():
                stream.fail(
                    DeadlineExceeded(
                        "the request's deadline expired", stage="total", after_s=stream.deadline_s
                    )
                )
                return
            log.exception("handler failed: endpoint=%s", stream.target)
            stream.end(KvoltError(f"internal error ({type(error).__name__})"))

    async def _pump(self, responses: AsyncIterator[Any]) -> None:
        stream = self._stream
        try:
            async for item in responses:
                stream.send(item)
                while not stream.writable and not stream.closed:
                    self._writable = asyncio.Event()
                    await self._writable.wait()
                    self._writable = None
                if stream.closed:
                    return
        finally:
            close = getattr(responses, "aclose", None)
            if close is not None:
                await close()

    def _on_writable(self) -> None:
        if self._writable is not None:
            self._writable.set()

    def _on_cancel(self, error: KvoltError) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()


def msgpack_decoder(kind: Any) -> Decode:
    """A msgpack decoder for a type."""
    return msgspec.msgpack.Decoder(kind).decode
