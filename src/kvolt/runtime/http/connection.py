"""Server side of one HTTP connection: an `asyncio.Protocol` that reads requests and writes responses in order.

Has timers, back-pressure in both directions and at most one task. Requests are processed one at a time, oldest first.
A task starts when a request is complete and ends when none is left, so an idle connection has no task. It is
cancelled when the client disconnects. The `host` routes the requests.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from kvolt.runtime.http.half_closed import HalfClosedWatch
from kvolt.runtime.http.host import ConnectionOwner
from kvolt.runtime.http.protocol import (
    BODILESS,
    CHUNKED_LINE,
    CLOSE_LINE,
    CONTINUE,
    HttpRequest,
    Response,
    connection_line,
    encode_head,
    encode_whole,
    has_body,
    json_error,
)
from kvolt.runtime.http.reader import ReadPhase, RequestReader
from kvolt.runtime.http.writer import EVENT_STREAM, SSE_COMMENT, ResponseWriter, WrittenResponse
from kvolt.runtime.lazy_timer import LazyTimer
from kvolt.runtime.network import join_address, tune_socket
from kvolt.runtime.security.identity import Identity, certificate_identity

log = logging.getLogger(__name__)

_SLICE_BYTES = 16 * 1024
"""Bytes parsed at a time; bounds how far the requests of one read can exceed `max_pipelined`."""

_JOIN_BYTES = 64 * 1024
"""Up to this size, concatenating head and body is cheaper than two buffers."""

_LINGER_S = 1.0
"""Wait before closing after a refusal: the client may still be sending, and a reset would discard the response."""

_CLIENT_DISCONNECTED = 499
"""Status for metrics only: the client disconnected before its response was complete."""

_BUSY = json_error(503, "too many connections", "overloaded", headers={"retry-after": "1"})
_STOPPING = json_error(503, "the server is stopping", "unavailable")


class HttpConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, host: ConnectionOwner[HttpConnection]) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, None)
        self._reader = cast(RequestReader, None)
        self._task: asyncio.Task[Any] | None = None
        self._current: HttpRequest | None = None
        self._started = 0.0
        self._head_sent = False
        self._backlog = b""
        self._reading_paused = False
        self._closing = False
        self._disconnected = False
        self._lost = False
        self._writer: ResponseWriter | None = None
        self._comment = b""
        self._drain_waiter: asyncio.Future[None] | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._half_closed: HalfClosedWatch | None = None
        self._timer = LazyTimer(self._loop, self._on_timeout)
        self._watched_mark = 0
        self._is_secure = False
        self._identity: Identity | None = None

    # transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        limits = self._host.limits
        self._reader = RequestReader(limits, _peer(transport), self._host.bodies)
        if not self._host.admit(self):
            self._write_final(_BUSY)
            self.close()
            # It is not counted, and with TLS stays open until the client closes it, too.
            self._timer.arm(_LINGER_S)
            return
        tune_socket(transport)
        self._is_secure = transport.get_extra_info("sslcontext") is not None
        self._identity = certificate_identity(transport) if self._is_secure else None
        self._transport.set_write_buffer_limits(high=limits.write_buffer_bytes)
        self._timer.arm(limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._closing or self._reader.done:
            return
        if self._reading_paused:
            self._backlog += data
            return
        self._feed(data)

    def eof_received(self) -> bool:
        """Keep the connection open while a request is in progress: its client may still read."""
        if self._task is None or self._closing or self._is_secure:  # TLS has no half-closed connections
            self._on_disconnect()
            self.close()
            return False
        self._reader.done = True
        self._half_closed = HalfClosedWatch(self._loop, self._transport, self._probe_client)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = self._lost = True
        self._timer.close()
        if self._half_closed is not None:
            self._half_closed.stop()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        self._host.remove_connection(self)
        self._on_disconnect()
        self._reader.release()

    def pause_writing(self) -> None:
        self._stall_timer = self._loop.call_later(self._host.limits.write_timeout_s, self._transport.abort)
        if self._writer is not None:
            self._writer.on_pause()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)
        if self._writer is not None:
            self._writer.on_resume()

    # called by the server

    def finish(self) -> None:
        """Close after the current request, or immediately if there is none."""
        if self._task is None and self._reader.phase is ReadPhase.IDLE:
            self.close()

    def close(self) -> None:
        """Flush written data, then close; a client that does not read is disconnected after the write time-out."""
        self._closing = True
        if self._lost:
            return
        self._transport.close()
        self._timer.arm(self._host.limits.write_timeout_s)

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def stop_reading(self) -> None:
        """Accept no further requests."""
        self._reader.stop()

    # reading

    def _feed(self, data: bytes) -> None:
        reader = self._reader
        if len(data) <= _SLICE_BYTES:
            reader.feed(data)
        else:
            self._feed_slices(data)
        if len(reader.requests) >= self._host.limits.max_pipelined and not self._reading_paused:
            self._pause_reading()
        if self._task is None:
            if reader.requests:
                self._task = self._host.start_task(self._serve())
            elif reader.refusal is not None:
                self._refuse(reader.refusal)
            elif reader.wants_continue:
                self._send_continue()
        self._arm_read_timer()

    def _feed_slices(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(data), _SLICE_BYTES):
            if len(self._reader.requests) >= self._host.limits.max_pipelined:
                self._backlog = data[start:]
                return
            self._reader.feed(view[start : start + _SLICE_BYTES])

    def _pause_reading(self) -> None:
        self._reading_paused = True
        self._timer.disarm()
        self._transport.pause_reading()

    def _resume_reading(self) -> None:
        self._reading_paused = False
        self._watched_mark = -1  # time in which reading was paused does not count against the client
        data, self._backlog = self._backlog, b""
        self._feed(data)
        if not self._reading_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def _send_continue(self) -> None:
        self._reader.wants_continue = False
        self._transport.write(CONTINUE)

    def _probe_client(self) -> None:
        """Write what clients ignore, so that a client that has closed its socket resets the connection."""
        request, writer = self._current, self._writer
        if writer is not None and writer.head_sent:
            writer.write(self._comment)
        elif request is not None and request.version != "1.0" and not self._head_sent:
            self._transport.write(CONTINUE)

    # responding

    async def _serve(self) -> None:
        requests = self._reader.requests
        try:
            while requests:
                self._current = self._reader.next_request()
                self._head_sent = False
                if self._reading_paused and len(requests) < self._host.limits.max_pipelined:
                    self._resume_reading()
                if not await self._answer(self._current):
                    self.close()
                    return
                self._current = None
                if self._stall_timer is not None:
                    await self._drained()
        except asyncio.CancelledError:
            if self._disconnected:
                if self._current is not None:
                    self._host.observe(self._current.method, _CLIENT_DISCONNECTED, self._started)
            else:
                if self._current is not None and not self._head_sent:
                    self._write_final(_STOPPING)
                self.close()
            raise
        except Exception:
            self._transport.abort()
            raise
        finally:
            self._task = self._current = None
        self._after_requests()

    def _after_requests(self) -> None:
        """Continue after the last complete request: send a pending refusal or 100 Continue, or arm the idle timer."""
        reader = self._reader
        if self._half_closed is not None:
            self.close()
        elif reader.refusal is not None:
            self._refuse(reader.refusal)
        elif reader.phase is ReadPhase.IDLE:
            if self._host.draining:
                self.close()
            else:
                self._timer.arm(self._host.limits.idle_timeout_s)
        elif reader.wants_continue:
            self._send_continue()

    async def _answer(self, request: HttpRequest) -> bool:
        """Write the response to `request`; False if the connection must close afterwards."""
        self._started = self._host.now()
        request.id = self._host.identify(request)
        request.identity = self._identity
        response = await self._host.respond(request)
        if self._disconnected:
            return False
        if isinstance(response, WrittenResponse):
            keep_alive, status = await self._run_producer(request, response)
        else:
            keep_alive, status = self._send(request, response), response.status
        self._host.observe(request.method, status, self._started)
        request.response_sent()
        return keep_alive

    def _keeps_alive(self, request: HttpRequest) -> bool:
        return request.keep_alive and not self._host.draining

    def _common_headers(self, request_id: str) -> str:
        """Headers of every response."""
        return f"{self._host.date_line()}x-request-id: {request_id}\r\n"

    def _send(self, request: HttpRequest, response: Response) -> bool:
        keep_alive = self._keeps_alive(request)
        line, common = connection_line(request, keep_alive), self._common_headers(request.id)
        try:
            head, body = encode_whole(response, request.method, line, common)
        except ValueError as error:
            head, body = encode_whole(self._host.failure(error, request), request.method, line, common)
        self._head_sent = True
        if len(body) <= _JOIN_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return keep_alive

    async def _run_producer(self, request: HttpRequest, response: WrittenResponse) -> tuple[bool, int]:
        chunked = request.version != "1.0"
        keep_alive = chunked and self._keeps_alive(request)
        try:
            framing = CHUNKED_LINE if chunked and response.status not in BODILESS else ""
            common = self._common_headers(request.id)
            head = encode_head(response, framing, connection_line(request, keep_alive), common)
            with_body = has_body(request.method, response.status)
            writer = ResponseWriter(self._transport, self._host.tick, head, chunked, with_body)
            self._writer = writer
            self._comment = SSE_COMMENT if response.content_type == EVENT_STREAM else b""
            await response.produce(writer)
            writer.end()
            writer.flush()
        except Exception as error:
            failure = self._host.failure(error, request)
            if self._writer is None or not self._writer.head_sent:
                return self._send(request, failure), failure.status
            self._transport.abort()
            return False, failure.status
        finally:
            if self._writer is not None:
                self._writer.flush()
                self._head_sent = self._writer.head_sent
                self._writer = None
        return keep_alive, response.status

    async def _drained(self) -> None:
        """Wait until the client has read enough; the stall timer aborts the connection otherwise."""
        self._drain_waiter = self._loop.create_future()
        try:
            await self._drain_waiter
        finally:
            self._drain_waiter = None

    # closing

    def _refuse(self, refusal: Response) -> None:
        self._write_final(refusal)
        if not self._transport.can_write_eof():
            self.close()
            return
        self._transport.write_eof()
        self._closing = True
        self._timer.arm(_LINGER_S)

    def _write_final(self, response: Response) -> None:
        current = self._current
        method = current.method if current is not None else ""
        common = self._common_headers(
            (current.id if current is not None else "") or self._host.identify(current)
        )
        head, body = encode_whole(response, method, CLOSE_LINE, common)
        self._transport.write(head + body)
        self._host.observe(method or "unread", response.status, self._host.now())

    def _on_disconnect(self) -> None:
        """Cancel the current request because the client disconnected."""
        if self._disconnected:
            return
        self._disconnected = True
        if self._writer is not None:
            self._writer.disconnected = True
        self.stop_reading()
        if self._task is not None:
            self._task.cancel()
        if self._current is not None:
            self._current.on_disconnected()

    # time-outs

    def _arm_read_timer(self) -> None:
        reader = self._reader
        if self._closing or self._reading_paused or reader.mark == self._watched_mark:
            return
        self._watched_mark = reader.mark
        if reader.phase is ReadPhase.HEAD:
            self._timer.arm(self._host.limits.header_timeout_s)
        elif reader.phase is ReadPhase.BODY:
            self._timer.arm(self._host.limits.body_timeout_s)
        elif self._task is not None:
            self._timer.disarm()

    def _on_timeout(self) -> None:
        reader = self._reader
        if self._closing:
            self._transport.abort()
        elif reader.phase is ReadPhase.IDLE:
            self.close()
        else:
            part = "headers" if reader.phase is ReadPhase.HEAD else "body"
            reader.refuse(408, f"the {part} of the request did not arrive in time", "request_timeout")
            if self._task is None and reader.refusal is not None:
                self._refuse(reader.refusal)


def _peer(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return join_address(name[0], name[1]) if isinstance(name, tuple) and len(name) >= 2 else ""
