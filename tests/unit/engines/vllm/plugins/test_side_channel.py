"""What readers ask an owner over a real socket, and that strangers' bytes end nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from tests.unit.engines.vllm.plugins.owner_lab import Owner

from kvolt.engines.vllm.plugins.kv_holds import HoldChecks, answer_of, check_message, renew_message

E = "engine"
PATIENCE_S = 30.0


class Reader:
    def __init__(self, limit_s: float = PATIENCE_S) -> None:
        self._context = zmq.Context()
        self.num_connections = 0
        self.checks = HoldChecks(self.connect, time.monotonic, limit_s)

    def connect(self, host: str, port: int) -> zmq.Socket[bytes]:
        self.num_connections += 1
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1e3))
        socket.connect(f"tcp://{host}:{port}")
        return socket

    def verdict(self, port: int, held: str, engine_id: str = E, read: str = "r") -> bool:
        while (verdict := self.checks.check(read, ("127.0.0.1", port), engine_id, held)) is None:
            time.sleep(0.001)
        return verdict

    def close(self) -> None:
        self.checks.close()
        self._context.term()


@pytest.fixture
def owner() -> Iterator[Owner]:
    with Owner() as owner:
        yield owner


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


def test_a_read_is_confirmed_while_its_blocks_are_held(owner: Owner, reader: Reader) -> None:
    owner.serve(E, "a")
    assert reader.verdict(owner.port, "a")
    assert reader.verdict(owner.port, "a"), "asked anew"
    assert not len(reader.checks)
    assert reader.num_connections == 1


@pytest.mark.parametrize("why", ["expired", "never held", "another engine"])
def test_a_read_is_not_confirmed_otherwise(owner: Owner, reader: Reader, why: str) -> None:
    owner.serve("engine before" if why == "another engine" else E, "a")
    if why == "expired":
        owner.holds.end("a")
    assert not reader.verdict(owner.port, "b" if why == "never held" else "a")


def test_a_hold_that_ends_between_question_and_answer_is_gone(owner: Owner, reader: Reader) -> None:
    """The owner answers for the moment at which it answers."""
    address = ("127.0.0.1", owner.port)
    assert reader.checks.check("r", address, E, "a") is None
    owner.serve(E)
    assert not reader.verdict(owner.port, "a")


def test_an_owner_that_does_not_answer_confirms_nothing(owner: Owner) -> None:
    """It is bound and serves nobody, as a process that hangs."""
    reader = Reader(limit_s=0.05)
    assert not reader.verdict(owner.port, "a")
    assert not len(reader.checks)
    reader.close()


def test_many_reads_of_one_owner(owner: Owner, reader: Reader) -> None:
    owner.serve(E, *(f"h{number}" for number in range(0, 50, 2)))
    address = ("127.0.0.1", owner.port)
    for number in range(50):
        reader.checks.check(f"r{number}", address, E, f"h{number}")
    verdicts = [reader.verdict(owner.port, f"h{number}", read=f"r{number}") for number in range(50)]
    assert verdicts == [number % 2 == 0 for number in range(50)]


def test_idle_owners_are_disconnected(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.engines.vllm.plugins.kv_holds._MAX_IDLE_OWNERS", 1)
    with Owner() as first, Owner() as second:
        for each in (first, second):
            each.serve(E, "a")
        for each in (first, second, first):
            assert reader.verdict(each.port, "a")
    assert reader.num_connections == 3


def test_renewals_reach_the_holds(owner: Owner, reader: Reader) -> None:
    owner.serve(E, "a")
    socket = reader.connect("127.0.0.1", owner.port)
    for engine_id in (E, "another"):
        socket.send_multipart((b"", renew_message(engine_id, ["a", "b"])))
    assert reader.verdict(owner.port, "a")
    socket.send_multipart((b"", check_message(E, 7, "a")))
    assert answer_of(socket.recv_multipart()) == (7, True), "the messages before it were read"
    assert owner.num_renewals == 1
    socket.close()


def test_strangers_end_nothing(owner: Owner, reader: Reader) -> None:
    owner.serve(E, "a")
    socket = reader.connect("127.0.0.1", owner.port)
    for message in (
        b"",
        b"\xc1",
        b"bad",
        msgspec.msgpack.encode([b"kvolt_check", [1, 2]]),
        b"\x91" * 100_000,
    ):
        socket.send_multipart((b"", message))
    socket.send_multipart((b"bad",))
    socket.send_multipart((b"", b"bad", check_message(E, 1, "a")))
    socket.send_multipart((b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 1))))
    handshake = msgspec.msgpack.encode((b"get_meta_msg", 0, 1))
    while (parts := socket.recv_multipart())[-1] != handshake:
        assert parts[-1] != b"bad"
    assert parts == [b"", b"hello", handshake], "vLLM's own handshakes pass"
    assert reader.verdict(owner.port, "a")
    socket.close()


@pytest.mark.parametrize("parts", [[], [b""], [b"\xc1"], [msgspec.msgpack.encode(["a", True])]])
def test_what_is_no_answer(parts: list[bytes]) -> None:
    assert answer_of(parts) is None
