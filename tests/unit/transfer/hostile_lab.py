"""Peers for the tests that say what they like: one that connects to an agent, and one that agents connect to."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvolt.runtime.security.credentials import Credentials
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.memory.slabs import Slab, SlabInfo
from kvolt.transfer.reads.wire import (
    Address,
    FrameReader,
    Hello,
    Message,
    Ticket,
    Welcome,
    encode_ticket,
    to_frame,
)

BLOCK = 4096
NUM = 64
SOON_S = 20.0


class Security:
    """Whether the agents and peers of a test use TLS."""

    credentials: Credentials | None = None


security = Security()


class Side:
    """A process's agent with a slab."""

    def __init__(self, shared_memory: bool = True, seed: int = 0) -> None:
        options = TransferOptions(shared_memory=shared_memory)
        self.agent = TransferAgent(options, credentials=security.credentials)
        self.slab = Slab.shared(NUM, BLOCK)
        self.rows = np.frombuffer(self.slab.memory, dtype=np.uint8).reshape(NUM, BLOCK)
        if seed:
            self.rows[:] = np.random.default_rng(seed).integers(0, 256, self.rows.shape)


class Talk:
    """One end of a connection, spoken by hand."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        link.settimeout(SOON_S)
        self._reader = FrameReader()
        self._heard: deque[Message] = deque()

    def say(self, *messages: Message) -> None:
        self.link.sendall(b"".join(map(to_frame, messages)))

    def hear(self) -> Message:
        while not self._heard:
            data = self.link.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            self._heard.extend(self._reader.feed(data))
        return self._heard.popleft()

    def is_let_go(self) -> bool:
        """Waits for it."""
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
            while self.link.recv(1 << 16):
                pass
        return True

    def give(self, data: bytes, descriptors: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self.link.sendmsg([data], rights)


@contextmanager
def calling(to: Address, use_unix: bool = False) -> Iterator[Talk]:
    """Connected to an agent, which was told nothing yet."""
    link = socket.socket(socket.AF_UNIX if use_unix else socket.AF_INET)
    with link:
        link.connect(f"\0{to.unix}" if use_unix else (to.host, to.port))
        if security.credentials is not None and not use_unix:
            link.settimeout(SOON_S)
            context = security.credentials.client_context
            with context.wrap_socket(link, do_handshake_on_connect=False) as tls:  # but with the first words
                yield Talk(tls)
        else:
            yield Talk(link)


@contextmanager
def reading_from(to: Address, use_unix: bool = False) -> Iterator[tuple[Talk, Welcome]]:
    """Connected to an agent, which has said welcome."""
    with calling(to, use_unix) as talk:
        talk.say(Hello("reader", "frames"))
        welcome = talk.hear()
        assert isinstance(welcome, Welcome)
        yield talk, welcome


class Source:
    """A peer that agents connect to, over TCP."""

    def __init__(self, name: str = "a-source") -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(SOON_S)
        self.address = Address(name, "127.0.0.1", self.listening.getsockname()[1], "")
        self._talks: list[Talk] = []

    def ticket(self, num_blocks: int = 1, secret: bytes = b"1", kind: MemoryKind = MemoryKind.HOST) -> bytes:
        slab = SlabInfo(number=0, kind=kind, block_bytes=BLOCK, num_blocks=NUM)
        return encode_ticket(Ticket(self.address, secret, slab, num_blocks))

    def accept(self) -> Talk:
        """The next that connects."""
        link = self.listening.accept()[0]
        if security.credentials is not None:
            link.settimeout(SOON_S)
            link = security.credentials.server_context.wrap_socket(link, server_side=True)
        talk = Talk(link)
        self._talks.append(talk)
        return talk

    def greet(self, *also_serves: str) -> Talk:
        """The next that connects was told welcome."""
        talk = self.accept()
        assert isinstance(talk.hear(), Hello)
        talk.say(Welcome(self.address.agent, also_serves=also_serves, key="key"))
        return talk

    def close(self) -> None:
        self.listening.close()
        for talk in self._talks:
            talk.link.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
