"""Hub: state of one agent: listeners, sessions, links, offers and mailboxes.

Used in the progress thread only; `agent` is the interface for the rest of the process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary

import numpy as np

from kvolt.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvoltError,
    Overloaded,
    ProtocolError,
)
from kvolt.runtime.clock import Clock
from kvolt.runtime.logs import is_logged
from kvolt.runtime.network import peer_group
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.nixl.path import Nixl
from kvolt.transfer.paths import nixl_library
from kvolt.transfer.paths.capabilities import PathCapabilities
from kvolt.transfer.paths.path_watch import PathOptions, PathWatch
from kvolt.transfer.peer.handshakes import Handshakes, TlsContexts
from kvolt.transfer.peer.link import PeerLink
from kvolt.transfer.peer.mailbox import Mailboxes, Waiter
from kvolt.transfer.peer.offers import Offer, Offers, select_blocks
from kvolt.transfer.peer.serving import ServingSession
from kvolt.transfer.peer.sockets import Listener, host_of, listen_tcp, listen_unix, resolve
from kvolt.transfer.reads import self_test
from kvolt.transfer.reads.progress import ProgressThread
from kvolt.transfer.reads.read_op import COPY, ReadOp
from kvolt.transfer.reads.wire import MAX_FRAME_BYTES, Address

log = logging.getLogger(__name__)

MAX_TIMEOUT_S = 7 * 86_400.0
_RETIRE_S = 1.0
_MAX_SESSIONS = 4096
_MAX_SESSIONS_PER_HOST = 1024
"""Connections from one address (IPv6: one /64); the Unix socket counts as one address."""
_MAX_LINKS = 4096

_NO_PATHS = PathOptions(capabilities=PathCapabilities(paths=frozenset()))


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where and how an agent listens."""

    host: str
    port: int
    advertise: str | None
    """Address published to peers; None: `host`."""
    uses_unix: bool
    credentials: TlsContexts | None = None
    """For TLS on TCP connections; None: plain TCP."""


class Hub:
    """See the module. Created in any thread; used in the progress thread only."""

    def __init__(
        self,
        listen: ListenOptions,
        clock: Clock,
        uses_nixl: bool = False,
        paths: PathOptions = _NO_PATHS,
    ) -> None:
        """ConfigError if the port is unavailable, `advertise` does not resolve or NIXL is not installed."""
        if uses_nixl:
            nixl_library.require_package()
        agent = secrets.token_hex(8)
        unix = f"kvolt-transfer-{agent}" if listen.uses_unix else ""
        sockets = [listen_tcp(listen.host, listen.port)]
        bound = sockets[0].getsockname()
        try:
            advertised = (
                bound[0] if listen.advertise is None else resolve(listen.advertise, sockets[0].family)
            )
            if listen.uses_unix:
                sockets.append(listen_unix(unix))
        except BaseException:
            sockets[0].close()
            raise
        self.address = Address(agent, advertised, bound[1], unix)
        self.progress = ProgressThread("kvolt-transfer", clock)
        credentials = listen.credentials
        self.handshakes = None if credentials is None else Handshakes(self.progress, credentials)
        self.nixl = Nixl(self.progress, agent) if uses_nixl else None
        self.uses_unix = listen.uses_unix
        self.is_closed = False
        self.offers = Offers(self._on_ticket_refused)
        self.num_refused_reads = 0
        """Tickets that a peer presented and that were made for another."""
        self.mailboxes = Mailboxes(self.progress)
        self._slab_numbers: WeakKeyDictionary[Slab, int] = WeakKeyDictionary()
        self._next_slab_number = count()
        """Slab numbers are never reused."""
        self.frame_budget = ByteBudget(4 * MAX_FRAME_BYTES, 2 * MAX_FRAME_BYTES)
        self.num_refused = 0
        """Connections refused because of a limit."""
        self._sessions: dict[ServingSession, str] = {}
        """With the `peer_group` of each."""
        self._num_by_host: Counter[str] = Counter()
        self._sessions_by_key: dict[str, ServingSession] = {}
        """Sessions without a chunk connection."""
        self._links: dict[Address, PeerLink] = {}
        """Keyed by the full address: agent names are not authenticated."""
        self._retired: set[PeerLink] = set()
        """Replaced links that still have operations."""
        self._local_reads: dict[ReadOp, Offer] = {}
        """Reads of offers of this agent."""
        self._listeners = [Listener(self.progress, each, self._accept) for each in sockets]
        self.paths = PathWatch(self.address.host, agent, paths.capabilities)
        self.tests_paths = paths.self_test
        self._test_slab = self_test.new_slab() if paths.self_test else None

    def start(self) -> None:
        for listener in self._listeners:
            listener.start()
        self._offer_self_test()

    def close(self) -> None:
        """Last call in the progress thread."""
        self.is_closed = True
        error = Cancelled("the agent was closed")
        for listener in self._listeners:
            listener.close()
        if self.handshakes is not None:
            self.handshakes.close()
        if self.nixl is not None:
            self.nixl.close(error)
        for link in [*self._links.values(), *self._retired]:
            link.close(error)
        for session in list(self._sessions):
            session.close()
        for read_op in list(self._local_reads):
            read_op.stop(error)
        self.offers.close()
        self.mailboxes.close()
        if self._test_slab is not None:
            with contextlib.suppress(BufferError):  # a reader still maps it
                self._test_slab.close()

    def deadline_in(self, timeout_s: float) -> float:
        """Absolute deadline, possibly past. Any thread. InvalidRequest if not finite or too long."""
        if not math.isfinite(timeout_s) or timeout_s > MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"timeout {timeout_s} s is invalid: at most {MAX_TIMEOUT_S:g} s", param="timeout_s"
            )
        return self.progress.now() + timeout_s

    def _accept(self, link: socket.socket) -> None:
        group = peer_group(host_of(link))
        self._check_limits(group)
        if self.handshakes is None or link.family == socket.AF_UNIX:
            self._open_session(link, group)
        else:
            self.handshakes.accept(link, group, lambda link: self._open_session(link, group))

    def _check_limits(self, group: str) -> None:
        """Overloaded if there are too many sessions."""
        for num_open, limit in (
            (len(self._sessions), _MAX_SESSIONS),
            (self._num_by_host[group], _MAX_SESSIONS_PER_HOST),
        ):
            if num_open >= limit:
                self.num_refused += 1
                raise Overloaded(f"too many connections from {group}", queue="peers", limit=limit)

    def _open_session(self, link: socket.socket, group: str) -> None:
        self._check_limits(group)  # others may have come during the handshake
        self._sessions[ServingSession(self, link)] = group
        self._num_by_host[group] += 1

    def register_chunk_key(self, session: ServingSession) -> None:
        """Allow a chunk connection to bind to this session."""
        self._sessions_by_key[session.key] = session

    def claim_chunk_key(self, key: str) -> ServingSession:
        """Session of a key, usable once. ProtocolError if unknown or used."""
        session = self._sessions_by_key.pop(key, None)
        if session is None:
            raise ProtocolError("unknown chunk key", rule="key")
        return session

    def remove_session(self, session: ServingSession) -> None:
        group = self._sessions.pop(session, None)
        if group is not None:
            self._num_by_host[group] -= 1
            if not self._num_by_host[group]:
                del self._num_by_host[group]
        self._sessions_by_key.pop(session.key, None)

    def remove_link(self, address: Address, link: PeerLink) -> None:
        if self._links.get(address) is link:
            del self._links[address]
        self._retired.discard(link)

    def has_link(self, address: Address) -> bool:
        return address in self._links

    def retire(self, address: Address, link: PeerLink) -> None:
        """New reads open another link; this one closes when idle."""
        self.remove_link(address, link)
        if link.is_idle:
            link.close(Cancelled("the connection was replaced"))
        else:
            self._retired.add(link)
            self.progress.call_at(self.progress.now() + _RETIRE_S, lambda: self._retire_again(address, link))

    def _retire_again(self, address: Address, link: PeerLink) -> None:
        if not link.is_closed:
            self.retire(address, link)

    def slab_number(self, slab: Slab) -> int:
        """Number by which peers know the slab."""
        number = self._slab_numbers.get(slab)
        if number is None:
            number = self._slab_numbers[slab] = next(self._next_slab_number)
        return number

    # --- offers

    def _on_ticket_refused(self, reader: str) -> None:
        self.num_refused_reads += 1
        number = self.num_refused_reads
        if is_logged(number):
            log.warning("ticket refused: peer=%s reason=made for another process refused=%d", reader, number)

    def offer(self, secret: bytes, offer: Offer) -> None:
        """Register an offer until done. Overloaded at the limit."""
        self.offers.add(secret, offer)
        timer = self.progress.call_at(offer.deadline, lambda: self._expire(secret, offer))
        offer.before_done(timer.cancel)

    def _offer_self_test(self, error: KvoltError | None = None) -> None:
        """Offer the self-test slab; repeated after each read."""
        slab = self._test_slab
        if slab is not None and not self.is_closed:
            blocks = np.arange(slab.num_blocks, dtype=np.int64)
            self.offers.add(self_test.SECRET, Offer(slab, blocks, float("inf"), self._offer_self_test))

    def _expire(self, secret: bytes, offer: Offer) -> None:
        error = DeadlineExceeded("the offer expired", stage="total")
        for session in list(self._sessions):
            session.revoke_offer(offer, error)
        for read_op in [each for each, source in self._local_reads.items() if source is offer]:
            read_op.stop(error)
        self.offers.expire(secret)

    # --- reads

    def read(self, read_op: ReadOp, deadline: float) -> None:
        timer = self.progress.call_at(deadline, lambda: read_op.stop(_deadline_error(read_op)))
        read_op.before_done(timer.cancel)
        address = read_op.request.ticket.address
        if address == self.address:
            self._read_local(read_op)
        else:
            try:
                self.link_to(address).read(read_op)
            except Overloaded as error:
                read_op.stop(error)

    def link_to(self, address: Address) -> PeerLink:
        """Link to an agent, created on first use. Overloaded at the limit."""
        link = self._links.get(address)
        if link is None:
            if len(self._links) >= _MAX_LINKS:
                raise Overloaded(f"too many links: limit is {_MAX_LINKS}", queue="links", limit=_MAX_LINKS)
            link = PeerLink(self, address)
            if not link.is_closed:
                self._links[address] = link
        return link

    def _read_local(self, read_op: ReadOp) -> None:
        """Read an offer of this agent, without a connection."""
        request = read_op.request
        try:
            offer = self.offers.begin_read(request.ticket.secret)
        except KvoltError as error:
            read_op.stop(error)
            return
        self._local_reads[read_op] = offer

        def on_ended(is_whole: bool) -> None:
            del self._local_reads[read_op]
            self.offers.end_read(request.ticket.secret, is_whole)

        read_op.start(_LocalSource(on_ended), 0, COPY)
        try:
            blocks = select_blocks(offer.blocks, request.positions)
        except KvoltError as error:
            read_op.stop(error)
            return
        if read_op.start_copy(offer.slab.contents, blocks, offer.slab.block_bytes):
            self.progress.schedule(read_op)

    # --- mailboxes

    def receive(self, address: Address, waiter: Waiter) -> None:
        """Wait for a message. Raises if the limit is reached or the deadline passed, else the waiter gets the
        outcome."""
        if address == self.address:
            self.mailboxes.wait_local(waiter)
            return
        link = self.link_to(address)
        self.mailboxes.wait_remote(waiter)
        link.receive(waiter)


class _LocalSource:
    """ReadSource for reads of this agent's own blocks."""

    def __init__(self, on_ended: Callable[[bool], None]) -> None:
        """`on_ended` gets whether the read was complete."""
        self._on_ended = on_ended

    def end_read(self, op: int, is_whole: bool) -> None:
        self._on_ended(is_whole)

    def forget_read(self, op: int) -> None: ...


def _deadline_error(read_op: ReadOp) -> KvoltError:
    return DeadlineExceeded(
        f"{read_op.request.num_bytes} bytes not received before the deadline over {read_op.path or 'a connection'}",
        stage="total" if read_op.path else "connect",
    )
