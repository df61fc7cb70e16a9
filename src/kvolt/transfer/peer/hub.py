"""Hub: one agent's state in its progress thread: who is connected, what is offered, posted, may be written to.

Owns the sockets that it listens on and the links that it opened. `agent` is how the rest of a process asks it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvolt.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    ProtocolError,
    Unsupported,
)
from kvolt.runtime.clock import Clock
from kvolt.runtime.network import peer_group
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.transfer.memory.slabs import Numbers, Slab, are_apart
from kvolt.transfer.nixl import library as nixl_library
from kvolt.transfer.nixl.memory import RAM
from kvolt.transfer.nixl.path import NIXL, Nixl
from kvolt.transfer.paths import file_path, self_test
from kvolt.transfer.paths.capabilities import Capabilities
from kvolt.transfer.paths.lanes import MemoryKind
from kvolt.transfer.paths.path_watch import PathOptions, PathWatch
from kvolt.transfer.peer.fetch_check import numbers_of
from kvolt.transfer.peer.link import Link
from kvolt.transfer.peer.mailbox import Guest, Rooms
from kvolt.transfer.peer.offers import Offered, Offers, chosen
from kvolt.transfer.peer.progress import Progress
from kvolt.transfer.peer.read_op import OWN, SHM, TCP, OnOver, Reading
from kvolt.transfer.peer.read_request import ALL, Wanted, new_wanted
from kvolt.transfer.peer.serving import Served
from kvolt.transfer.peer.sockets import Listener, host_of, listen_tcp, listen_unix, resolve
from kvolt.transfer.peer.wire import CUDA_IPC, MAX_FRAME_BYTES, Address, Offer

log = logging.getLogger(__name__)

MAX_TIMEOUT_S = 7 * 86_400.0
MAX_WRITABLES = 65_536
_RETIRE_S = 1.0
_MAX_SERVED = 4096
_MAX_SERVED_PER_PEER = 1024
"""Connections from one address (of IPv6: from one /64), and over the Unix socket."""
_MAX_LINKS = 4096

_NO_PATHS = PathOptions(can=Capabilities(paths=frozenset()))

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
        paths: PathOptions = _NO_PATHS,
    ) -> None:
        """ConfigError when the port cannot be listened on, `advertise` has no address, or NIXL is not installed."""
        if uses_nixl:
            nixl_library.require()
        agent = secrets.token_hex(8)
        unix = f"kvolt-transfer-{agent}" if uses_unix else ""
        listening = [listen_tcp(host, port)]
        bound = listening[0].getsockname()
        try:
            told = bound[0] if advertise is None else resolve(advertise, listening[0].family)
            if uses_unix:
                listening.append(listen_unix(unix))
        except BaseException:
            listening[0].close()
            raise
        self.address = Address(agent, told, bound[1], unix)
        self.progress = Progress("kvolt-transfer", clock)
        self.nixl = Nixl(self.progress, agent) if uses_nixl else None
        self.uses_unix = uses_unix
        self.is_closed = False
        self.offers = Offers()
        self.rooms = Rooms(self.progress)
        self._numbers: WeakKeyDictionary[Slab, int] = WeakKeyDictionary()
        self._next_number = count()
        """A number that was told is never another slab's."""
        self.unfinished = ByteBudget(4 * MAX_FRAME_BYTES, 2 * MAX_FRAME_BYTES)
        self.num_refused = 0
        """Connections over the limits."""
        self._served: dict[Served, str] = {}
        """With the `peer_group` of each."""
        self._num_from: Counter[str] = Counter()
        self._by_key: dict[str, Served] = {}
        """Those whose blocks nobody takes yet."""
        self._links: dict[Address, Link] = {}
        """By all of an address: an agent's name alone anybody can give himself."""
        self._retired: set[Link] = set()
        """That finish what was begun over them."""
        self._own_reads: dict[Reading, Offered] = {}
        """Of what this very agent offers."""
        self._writables: dict[int, Writable] = {}
        self._listeners = [Listener(self.progress, each, self._let_in) for each in listening]
        self.paths = PathWatch(self.address.host, agent, paths.can)
        self.tests_paths = paths.self_test
        self._test_slab = self_test.new_slab() if paths.self_test else None

    def start(self) -> None:
        for listener in self._listeners:
            listener.start()
        self._offer_test()

    def close(self) -> None:
        """The last that is done in the thread."""
        self.is_closed = True
        error = Cancelled("the agent was closed")
        for listener in self._listeners:
            listener.close()
        if self.nixl is not None:
            self.nixl.close(error)
        for link in [*self._links.values(), *self._retired]:
            link.close(error)
        for served in list(self._served):
            served.close()
        for reading in list(self._own_reads):
            reading.stop(error)
        self.offers.close()
        self.rooms.close()
        for secret in list(self._writables):
            self._writable_over(secret, error)
        if self._test_slab is not None:
            with contextlib.suppress(BufferError):  # somebody who read it is not quite gone: it goes with him
                self._test_slab.close()

    def deadline_in(self, timeout_s: float) -> float:
        """One that has passed is one, too. Asked from any thread; InvalidRequest for what is no time."""
        if not math.isfinite(timeout_s) or timeout_s > MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"a timeout of {timeout_s} s: it must be a number up to {MAX_TIMEOUT_S:g}", param="timeout_s"
            )
        return self.progress.now() + timeout_s

    def _let_in(self, link: socket.socket) -> None:
        group = peer_group(host_of(link))
        for num_open, limit in (
            (len(self._served), _MAX_SERVED),
            (self._num_from[group], _MAX_SERVED_PER_PEER),
        ):
            if num_open >= limit:
                self.num_refused += 1
                raise Overloaded(f"{group} has the most connections it may have", queue="peers", limit=limit)
        self._served[Served(self, link)] = group
        self._num_from[group] += 1

    def give_key(self, served: Served) -> None:
        """Who presents it may take the blocks that this one reads."""
        self._by_key[served.key] = served

    def take_key(self, key: str) -> Served:
        """Whose it is. ProtocolError for one that is nobody's, or was taken."""
        served = self._by_key.pop(key, None)
        if served is None:
            raise ProtocolError("blocks are asked for in the name of nobody who is here", rule="key")
        return served

    def gone(self, served: Served) -> None:
        group = self._served.pop(served, None)
        if group is not None:
            self._num_from[group] -= 1
            if not self._num_from[group]:
                del self._num_from[group]
        self._by_key.pop(served.key, None)

    def unlink(self, address: Address, link: Link) -> None:
        if self._links.get(address) is link:
            del self._links[address]
        self._retired.discard(link)

    def is_linked(self, address: Address) -> bool:
        return address in self._links

    def retire(self, address: Address, link: Link) -> None:
        """New reads open another link; this one ends when nothing is left of it."""
        self.unlink(address, link)
        if link.is_idle:
            link.close(Cancelled("another connection takes its place"))
        else:
            self._retired.add(link)
            self.progress.at(self.progress.now() + _RETIRE_S, lambda: self._retire_again(address, link))

    def _retire_again(self, address: Address, link: Link) -> None:
        if not link.is_closed:
            self.retire(address, link)

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

    def _offer_test(self, error: KvoltError | None = None) -> None:
        """What those read who test the paths from here: again when it is over, and any number of times."""
        slab = self._test_slab
        if slab is not None and not self.is_closed:
            blocks = np.arange(slab.num_blocks, dtype=np.int64)
            self.offers.add(self_test.SECRET, Offered(slab, blocks, float("inf"), self._offer_test))

    def _expire(self, secret: int, offered: Offered) -> None:
        error = DeadlineExceeded("the offer of these blocks has expired", stage="total")
        for served in list(self._served):
            served.revoke(offered, error)
        for reading in [each for each, what in self._own_reads.items() if what is offered]:
            reading.stop(error)
        self.offers.expire(secret)

    # --- reading

    def read(self, reading: Reading, deadline: float) -> None:
        timer = self.progress.at(deadline, lambda: reading.stop(_late(reading)))
        reading.then(timer.cancel)
        address = reading.wanted.ticket.address
        if address == self.address:
            self._read_own(reading)
        elif reading.wanted.slab.kind is MemoryKind.FILE:
            told = "blocks of a peer do not go to a file: read them into memory, and from there to the file"
            reading.stop(Unsupported(told, feature=file_path.FILE))
        else:
            try:
                self.link_to(address).read(reading)
            except Overloaded as error:
                reading.stop(error)

    def link_to(self, address: Address) -> Link:
        """Overloaded when there are too many."""
        link = self._links.get(address)
        if link is None:
            if len(self._links) >= _MAX_LINKS:
                raise Overloaded(f"{_MAX_LINKS} peers are read from already", queue="links", limit=_MAX_LINKS)
            link = Link(self, address)
            if not link.is_closed:
                self._links[address] = link
        return link

    def paths_from(
        self, source: MemoryKind, destination: MemoryKind, is_near: bool, serves: Container[str]
    ) -> list[str]:
        """All by which bytes could come from a peer that serves these, the most likely one first."""
        paths = []
        if is_near and source is MemoryKind.SHARED:
            paths.append(SHM)
        if is_near and source is destination is MemoryKind.DEVICE and CUDA_IPC in serves:
            paths.append(CUDA_IPC)
        can_nixl = self.nixl is not None and self.nixl.is_usable and NIXL in serves
        if can_nixl and source in RAM and destination in RAM:
            paths.append(NIXL)
        return [*paths, TCP]

    def _read_own(self, reading: Reading) -> None:
        """Of what this very agent offers: no connection, and the same rules."""
        wanted = reading.wanted
        try:
            offered = self.offers.begin(wanted.ticket.secret)
        except KvoltError as error:
            reading.stop(error)
            return
        self._own_reads[reading] = offered
        is_file = MemoryKind.FILE in (offered.slab.kind, wanted.slab.kind)

        def ended(is_whole: bool) -> None:
            del self._own_reads[reading]
            self.offers.end(wanted.ticket.secret, is_whole)

        reading.begin(_Own(ended), 0, file_path.FILE if is_file else OWN)
        try:
            blocks = chosen(offered.blocks, wanted.positions)
        except KvoltError as error:
            reading.stop(error)
            return
        if is_file:
            file_path.move(self.progress, reading, offered.slab, blocks)
        elif reading.copy_from(offered.slab.contents, blocks, offered.slab.block_bytes):
            self.progress.work(reading)

    # --- rooms

    def meet(self, address: Address, guest: Guest) -> None:
        """Its end is told to it; Overloaded, or late already: it is not."""
        if address == self.address:
            self.rooms.meet_here(guest)
            return
        link = self.link_to(address)
        self.rooms.meet_away(guest)
        link.meet(guest)

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
        positions = numbers_of(offer.positions)
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

    def __init__(self, on_ended: Callable[[bool], None]) -> None:
        """`on_ended` is told whether all was read."""
        self._on_ended = on_ended

    def ended(self, op: int, is_whole: bool) -> None:
        self._on_ended(is_whole)

    def forget(self, op: int) -> None: ...


def _late(reading: Reading) -> KvoltError:
    return DeadlineExceeded(
        f"{reading.wanted.num_bytes} bytes did not come in time over {reading.path or 'a connection'}",
        stage="total" if reading.path else "connect",
    )
