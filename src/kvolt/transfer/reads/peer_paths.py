"""PeerPaths: reports the reads of one link to the PathWatch and runs the self-test after the first read.

The test waits until no other read from the peer is active, so that neither delays the other. Slow paths are checked
after the test, against measured speeds.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.paths.capabilities import PathCapabilities
from kvolt.transfer.paths.path_watch import Endpoints, PathWatch, Peer, TransferPath
from kvolt.transfer.reads.progress import ProgressThread
from kvolt.transfer.reads.read_op import TCP, ReadOp
from kvolt.transfer.reads.read_request import ReadRequest
from kvolt.transfer.reads.self_test import SelfTest, TestedLink
from kvolt.transfer.reads.wire import Address

_MAX_PATHS = 64
"""Paths checked per peer; further ones are not checked for fallbacks."""


class PeerPaths:
    """See the module. Progress thread only."""

    def __init__(
        self, watch: PathWatch, progress: ProgressThread, link: TestedLink, address: Address, needs_test: bool
    ) -> None:
        self._watch = watch
        self._progress = progress
        self._link = link
        self._address = address
        self._needs_test = needs_test
        """The self-test has not run yet."""
        self._is_testing = False
        self._peer: Peer | None = None
        self._checked: dict[TransferPath, bool] = {}
        """Paths that blocks took, and whether each was checked for a fallback."""

    def on_welcome(self, capabilities: PathCapabilities | None, is_near: bool) -> None:
        """`capabilities`: None from a peer that sends none; it cannot be tested."""
        if capabilities is None:
            self._needs_test = False
            capabilities = PathCapabilities(
                paths=frozenset(("copy", "tcp", "shm") if is_near else ("copy", "tcp"))
            )
        self._peer = self._watch.peer(self._address.host, self._address.agent, is_near, capabilities)

    def on_read_done(self, read_op: ReadOp) -> None:
        """Handle the end of a read, successful or not."""
        if self._peer is None or not read_op.is_complete:
            return
        request = read_op.request
        path = TransferPath(endpoints_of(request), read_op.path)
        self._watch.observe(self._peer, path, request.num_bytes, self._progress.now() - read_op.started_at)
        if read_op.is_test:
            return
        if len(self._checked) < _MAX_PATHS:
            self._checked.setdefault(path, False)
        if not self._needs_test:
            self._check_fallbacks()
        elif not self._is_testing and not self._link.is_busy:
            self._is_testing = True
            # Deferred, so that the caller of the read is notified first.
            self._progress.call_soon(self._run_test)

    def choose_path(self, request: ReadRequest, paths: Sequence[str]) -> str:
        """Usable path that is expected to be fastest."""
        return (
            paths[0]
            if self._peer is None
            else self._watch.choose_path(self._peer, endpoints_of(request), paths)
        )

    def _run_test(self) -> None:
        paths = self._link.paths_between(MemoryKind.SHARED, MemoryKind.HOST)
        # TCP only without an alternative: it needs another connection, and a peer on this host may not be reachable.
        paths = [path for path in paths if path != TCP] or paths
        SelfTest(self._progress, self._link, self._address, paths, self._on_tested).start()

    def _on_tested(self) -> None:
        self._needs_test = self._is_testing = False
        self._check_fallbacks()
        self._watch.on_tested()

    def _check_fallbacks(self) -> None:
        for path in [path for path, is_checked in self._checked.items() if not is_checked]:
            self._checked[path] = True
            if self._peer is not None:
                self._watch.check_fallback(self._peer, path)


def endpoints_of(request: ReadRequest) -> Endpoints:
    remote, local = request.ticket.slab, request.slab
    device_name = None if local.device is None else local.device.name
    return Endpoints(remote.kind, local.kind, remote.device, device_name)
