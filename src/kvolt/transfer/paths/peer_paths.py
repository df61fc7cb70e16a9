"""PeerPaths: what a link learns of the paths to its peer: each read that ends tells something, the first brings a test.

The test waits until nothing else is read from the peer, so that nobody waits for it and it is not slowed down itself;
which way blocks came is judged after it, by what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvolt.transfer.paths.capabilities import Capabilities
from kvolt.transfer.paths.lanes import MemoryKind
from kvolt.transfer.paths.path_watch import Ends, PathWatch, Peer, Way
from kvolt.transfer.paths.self_test import SelfTest
from kvolt.transfer.peer.progress import Progress
from kvolt.transfer.peer.read_op import TCP, Reading
from kvolt.transfer.peer.read_request import Wanted
from kvolt.transfer.peer.wire import Address

if TYPE_CHECKING:
    from kvolt.transfer.peer.link import Link


_MAX_WAYS = 64
"""From and to which blocks of one peer came: those after them are not judged."""


class PeerPaths:
    """See the module. In the progress thread only."""

    def __init__(self, watch: PathWatch, progress: Progress, link: Link, to: Address, tests: bool) -> None:
        self._watch = watch
        self._progress = progress
        self._link = link
        self._to = to
        self._tests = tests
        """A test is still to be made."""
        self._is_testing = False
        self._peer: Peer | None = None
        self._judged: dict[Way, bool] = {}
        """The ways that blocks came; those that were not judged yet with False. A few kinds of memory and paths."""

    def welcomed(self, can: Capabilities | None, is_near: bool) -> None:
        """`can`: None from a peer that does not say, nor can be tested."""
        if can is None:
            self._tests = False
            can = Capabilities(paths=frozenset(("copy", "tcp", "shm") if is_near else ("copy", "tcp")))
        self._peer = self._watch.peer(self._to.host, self._to.agent, is_near, can)

    def ended(self, reading: Reading) -> None:
        """A read of this peer, however it went."""
        if self._peer is None or not reading.is_complete:
            return
        wanted = reading.wanted
        way = Way(ends_of(wanted), reading.path)
        self._watch.observe(self._peer, way, wanted.num_bytes, self._progress.now() - reading.began_at)
        if reading.is_test:
            return
        if len(self._judged) < _MAX_WAYS:
            self._judged.setdefault(way, False)
        if not self._tests:
            self._judge()
        elif not self._is_testing and not self._link.is_busy:
            self._is_testing = True
            # Later, that whoever has read is told first.
            self._progress.call(self._test)

    def choose(self, wanted: Wanted, paths: Sequence[str]) -> str:
        """Of these, by which blocks could come: the one that is expected to be the fastest."""
        return paths[0] if self._peer is None else self._watch.fastest(self._peer, ends_of(wanted), paths)

    def _test(self) -> None:
        paths = self._link.paths_between(MemoryKind.SHARED, MemoryKind.HOST)
        # TCP only where there is nothing else: it takes a connection more, and who is near may not be reached so.
        paths = [path for path in paths if path != TCP] or paths
        SelfTest(self._progress, self._link, self._to, paths, self._tested).start()

    def _tested(self) -> None:
        self._tests = self._is_testing = False
        self._judge()
        self._watch.on_tested()

    def _judge(self) -> None:
        for way in [way for way, is_judged in self._judged.items() if not is_judged]:
            self._judged[way] = True
            if self._peer is not None:
                self._watch.judge(self._peer, way)


def ends_of(wanted: Wanted) -> Ends:
    theirs, ours = wanted.ticket.slab, wanted.slab
    named = None if ours.device is None else ours.device.name
    return Ends(theirs.kind, ours.kind, theirs.device, named)
