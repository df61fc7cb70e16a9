"""Hub: one agent's state in its progress thread: who is connected, what is offered, what may be written to.

Owns the sockets that it listens on and the links that it opened. `agent` is how the rest of a process asks it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from selectors import EVENT_READ
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvolt.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    Unsupported,
)
from kvolt.runtime.clock import Clock
from kvolt.transfer import file_path, nixl_library
from kvolt.transfer.chunks import ChunkSender
from kvolt.transfer.lanes import MemoryKind
from kvolt.transfer.link import Link
from kvolt.transfer.memory import Numbers, Slab, are_apart
from kvolt.transfer.nixl_memory import RAM
from kvolt.transfer.nixl_path import NIXL, Nixl
from kvolt.transfer.offered import Offered, Offers, chosen
from kvolt.transfer.progress import Progress
from kvolt.transfer.reading import OWN, OnOver, Reading
from kvolt.transfer.serving import Served
from kvolt.transfer.wanted import ALL, Wanted, new_wanted
from kvolt.transfer.wire import Address, Offer

log = logging.getLogger(__name__)

MAX_WRITABLES = 65_536
_BACKLOG = 512
_CREDENTIALS = struct.Struct("3i")
"""Process, user, group."""
_MAX_SERVED = 4096

TakeOffer = Callable[[KvoltError | None], None]


@dataclass(slots=True)
class Writable:
    """Blocks that a peer may send something for, each once."""

    slab: Slab
    blocks: Numbers
    seeds: bytes | None
    deadline: float
    on_over: OnOver
    is_taken: npt.NDArray[np.bool_]
    """By block: somebody sends it, or has."""
    num_left: int
    """Blocks that have not come."""
    readings: set[Reading] = field(default_factory=set)
    """That are under way."""
    ends_with: KvoltError | None = None
    """Why it is over, while somebody still writes to its blocks."""


class Hub:
    """See the module. Made anywhere; used in the progress thread only."""

    def __init__(
        self,
        host: str,
        port: int,
        advertise: str | None,
        uses_unix: bool,
        clock: Clock,
        uses_nixl: bool = False,
    ) -> None:
        """ConfigError when the port cannot be listened on, or NIXL is not installed."""
        if uses_nixl:
            nixl_library.require()
        agent = secrets.token_hex(8)
        self.progress = Progress("kvolt-transfer", clock)
        self.nixl = Nixl(self.progress, agent) if uses_nixl else None
        self.uses_unix = uses_unix
        self.is_closed = False
        self.offers = Offers()
        self.senders: dict[str, ChunkSender] = {}
        """By the agent that they send to."""
        self._numbers: WeakKeyDictionary[Slab, int] = WeakKeyDictionary()
        self._next_number = count()
        """A number that was told is never another slab's."""
        self._served: dict[Served, None] = {}
        self._links: dict[str, Link] = {}
        self._writables: dict[int, Writable] = {}
        self._listening = [_listen_tcp(host, port)]
        unix = f"kvolt-transfer-{agent}"
        if uses_unix:
            self._listening.append(_listen_unix(unix))
        bound = self._listening[0].getsockname()
        self.address = Address(agent, advertise or bound[0], bound[1], unix if uses_unix else "")

    def start(self) -> None:
        for listening in self._listening:
            self.progress.watch(listening.fileno(), EVENT_READ, partial(self._accept, listening))

    def close(self) -> None:
        """The last that is done in the thread."""
        self.is_closed = True
        error = Cancelled("the agent was closed")
        for listening in self._listening:
            self.progress.forget(listening.fileno())
            listening.close()
        if self.nixl is not None:
            self.nixl.close(error)
        for link in list(self._links.values()):
            link.close(error)
        for served in list(self._served):
            served.close()
        for sender in list(self.senders.values()):
            sender.close()
        self.offers.close()
        for secret in list(self._writables):
            self._writable_over(secret, error)

    def _accept(self, listening: socket.socket, events: int) -> None:
        try:
            link, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE):
                raise
            log.warning("a peer could not be let in: %s", error)
            return
        link.setblocking(False)
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        elif not _is_ours(link):
            log.warning("a process of another user was not let in")
            link.close()
            return
        if len(self._served) >= _MAX_SERVED:
            log.warning("a peer was not let in: %d are", _MAX_SERVED)
            link.close()
            return
        self._served[Served(self, link)] = None

    def gone(self, served: Served) -> None:
        self._served.pop(served, None)
        self.senders = {agent: each for agent, each in self.senders.items() if each.is_open}

    def unlink(self, agent: str) -> None:
        self._links.pop(agent, None)

    def number_of(self, slab: Slab) -> int:
        """Peers know slabs by numbers."""
        number = self._numbers.get(slab)
        if number is None:
            number = self._numbers[slab] = next(self._next_number)
        return number

    # --- offers: what peers read

    def offer(self, secret: int, offered: Offered) -> None:
        """Until it is over. Overloaded when there are too many."""
        self.offers.add(secret, offered)
        timer = self.progress.at(offered.deadline, lambda: self._expire(secret, offered))
        offered.on_over = _after(timer.cancel, offered.on_over)

    def _expire(self, secret: int, offered: Offered) -> None:
        error = DeadlineExceeded("the offer of these blocks has expired", stage="total")
        for served in list(self._served):
            served.revoke(offered, error)
        self.offers.expire(secret)

    # --- reading

    def read(self, reading: Reading, deadline: float) -> None:
        timer = self.progress.at(deadline, lambda: reading.stop(_late(reading)))
        reading.then(timer.cancel)
        address = reading.wanted.ticket.address
        if address.agent == self.address.agent:
            self._read_own(reading)
        elif reading.wanted.slab.kind is MemoryKind.FILE:
            told = "blocks of a peer do not go to a file: read them into memory, and from there to the file"
            reading.stop(Unsupported(told, feature=file_path.FILE))
        else:
            self.link_to(address).read(reading)

    def link_to(self, address: Address) -> Link:
        link = self._links.get(address.agent)
        if link is None:
            link = Link(self, address)
            if not link.is_closed:
                self._links[address.agent] = link
        return link

    def path_to(self, wanted: Wanted, is_near: bool, also_serves: tuple[str, ...] = ()) -> str:
        """How bytes come here from a peer."""
        theirs, ours = wanted.ticket.slab.kind, wanted.slab.kind
        can_nixl = self.nixl is not None and self.nixl.is_usable and NIXL in also_serves
        if can_nixl and theirs in RAM and ours in RAM:
            return NIXL
        return "shm" if is_near and theirs is MemoryKind.SHARED else "tcp"

    def _read_own(self, reading: Reading) -> None:
        """Of what this very agent offers: no connection, and the same rules."""
        wanted = reading.wanted
        try:
            offered = self.offers.begin(wanted.ticket.secret)
        except KvoltError as error:
            reading.stop(error)
            return
        is_file = MemoryKind.FILE in (offered.slab.kind, wanted.slab.kind)
        reading.begin(_Own(self.offers, wanted.ticket.secret), 0, file_path.FILE if is_file else OWN)
        try:
            blocks = chosen(offered.blocks, wanted.positions)
        except KvoltError as error:
            reading.stop(error)
            return
        if is_file:
            file_path.move(self.progress, reading, offered.slab, blocks)
        elif reading.copy_from(offered.slab.memory, blocks, offered.slab.block_bytes):
            self.progress.work(reading)

    # --- what may be written to

    def let_write(self, secret: int, writable: Writable) -> None:
        if len(self._writables) >= MAX_WRITABLES:
            raise Overloaded(
                f"{MAX_WRITABLES} sets of blocks wait to be written to already",
                queue="writables",
                limit=MAX_WRITABLES,
            )
        self._writables[secret] = writable
        late = DeadlineExceeded("nobody has written to these blocks in time", stage="total")
        timer = self.progress.at(writable.deadline, lambda: self._writable_over(secret, late))
        writable.on_over = _after(timer.cancel, writable.on_over)

    def withdraw_writable(self, secret: int) -> None:
        self._writable_over(secret, Cancelled("nobody is to write to these blocks any more"))

    def take_offer(self, offer: Offer, answer: TakeOffer) -> None:
        """A peer has something for blocks of ours: read it, then say so."""
        try:
            writable, positions, wanted = self._claim(offer)
        except KvoltError as error:
            answer(error)
            return

        def over(error: KvoltError | None) -> None:
            writable.is_taken[positions] = error is None
            if error is None:
                writable.num_left -= len(positions)
            writable.readings.discard(reading)
            answer(error)
            if not writable.num_left:
                self._writable_over(offer.secret, None)
            elif writable.ends_with is not None and not writable.readings:
                writable.on_over(writable.ends_with)

        reading = Reading(wanted, over)
        writable.is_taken[positions] = True
        writable.readings.add(reading)
        self.read(reading, writable.deadline)

    def _claim(self, offer: Offer) -> tuple[Writable, Numbers, Wanted]:
        writable = self._writables.get(offer.secret)
        if writable is None:
            raise NotFound(
                "these blocks may not be written to any more", kind="ticket", name=f"{offer.secret:016x}"
            )
        positions = np.frombuffer(offer.positions, dtype="<i8")
        num_blocks = len(writable.blocks)
        if len(positions) != offer.ticket.num_blocks or not len(positions):
            raise InvalidRequest("as many positions as there are blocks", param="positions")
        if positions.min() < 0 or positions.max() >= num_blocks or not are_apart(positions, num_blocks):
            raise InvalidRequest(f"positions outside of {num_blocks} blocks, or twice", param="positions")
        if writable.is_taken[positions].any():
            raise InvalidRequest("some of these blocks were written to already", param="positions")
        seeds = None if writable.seeds is None else np.frombuffer(writable.seeds, "<u8")[positions].tobytes()
        blocks = writable.blocks[positions]
        wanted = new_wanted(offer.ticket, writable.slab, blocks, ALL, seeds, offer.is_checked)
        return writable, positions, wanted

    def _writable_over(self, secret: int, error: KvoltError | None) -> None:
        writable = self._writables.pop(secret, None)
        if writable is None:
            return
        if error is not None:
            for reading in list(writable.readings):
                reading.stop(error)
        if writable.readings:
            writable.ends_with = error
        else:
            writable.on_over(error)


def _after(first: Callable[[], None], on_over: OnOver) -> OnOver:
    """The same, told after something else was done."""

    def over(error: KvoltError | None) -> None:
        first()
        on_over(error)

    return over


class _Own:
    """The Source of a read of our own blocks."""

    def __init__(self, offers: Offers, secret: int) -> None:
        self._offers = offers
        self._secret = secret

    def ended(self, op: int, is_whole: bool) -> None:
        self._offers.end(self._secret, is_whole)

    def forget(self, op: int) -> None: ...


def _is_ours(link: socket.socket) -> bool:
    """Whether the peer of a Unix socket is of the same user: who may map one slab of ours sees all of it."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (0, os.getuid())


def _late(reading: Reading) -> KvoltError:
    return DeadlineExceeded(
        f"{reading.wanted.num_bytes} bytes did not come in time over {reading.path or 'a connection'}",
        stage="total" if reading.path else "connect",
    )


def _listen_tcp(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"blocks cannot be served at {host}:{port}: {error.strerror}",
            key="transfer.port",
            remedy="name a free port, or 0 for any",
        ) from None
    return listening


def _listen_unix(name: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0{name}")
    listening.listen(_BACKLOG)
    listening.setblocking(False)
    return listening
