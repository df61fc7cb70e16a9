"""Bytes of pieces, moved and summed: in Python, and native in every form that this CPU has."""

from __future__ import annotations

import importlib
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvolt.transfer.memory import block_bytes
from kvolt.transfer.memory import block_bytes_python as bytes_python
from kvolt.transfer.memory.checksum import checksum, checksums

native: Any = (
    importlib.import_module("kvolt.transfer.memory._bytes_native") if block_bytes.IS_NATIVE else None
)
FORMS = ["python", *(native.FORMS if native else ())]
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=FORMS)
def moving(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "python":
        yield bytes_python
        return
    native.use_form(request.param)
    yield native
    native.use_form(native.FORMS[-1])


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        yield left, right


def numbers(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def noise(length: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def test_pieces_go_to_their_places(moving: ModuleType) -> None:
    dst = bytearray(b"............")
    moving.copy(dst, numbers(9, 0, 3), b"aabbccdd", numbers(6, 2, 4), 2)
    assert dst == b"bb.cc....dd."
    moving.copy(dst, numbers(), b"", numbers(), 5)
    assert dst == b"bb.cc....dd."


def test_neighbours_on_one_side_only(moving: ModuleType) -> None:
    dst = bytearray(8)
    moving.copy(dst, numbers(0, 2, 4, 6), b"aabbccdd", numbers(0, 2, 6, 4), 2)
    assert dst == b"aabbddcc"
    moving.copy(dst, numbers(6, 4, 0, 2), b"aabbccdd", numbers(0, 2, 4, 6), 2)
    assert dst == b"ccddbbaa"


@pytest.mark.parametrize("size", [1, 7, 8, 9, 255, 4096, 65536, 65536 + 8, 200_003])
def test_a_piece_of_any_size(moving: ModuleType, size: int) -> None:
    src, dst, out = noise(size + 3), np.zeros(size + 1, dtype=np.uint8), np.zeros(1, dtype=np.uint64)
    seeds = np.array([2**64 - 5], dtype=np.uint64)
    expected = checksum(src[3:], 2**64 - 5)
    moving.checksums(src, numbers(3), size, 1, seeds, out)
    assert out[0] == expected
    out[0] = 0
    moving.copy_checked(dst, numbers(1), src, numbers(3), size, 1, seeds, out)
    assert out[0] == expected
    assert (dst[1:] == src[3:]).all()
    assert dst[0] == 0


def test_several_pieces_make_a_block(moving: ModuleType) -> None:
    src, dst, out = noise(2000), np.zeros(2000, dtype=np.uint8), np.zeros(3, dtype=np.uint64)
    origins, places = numbers(8, 700, 3, 800, 1000, 1100), numbers(0, 304, 1600, 1000, 1304, 608)
    moving.copy_checked(dst, places, src, origins, 296, 2, None, out)
    assert out[1] == checksum(np.concatenate([src[3:299], src[800:1096]]))
    assert (dst[1600:1896] == src[3:299]).all()
    again = np.zeros(3, dtype=np.uint64)
    moving.checksums(dst, places, 296, 2, None, again)
    assert again.tolist() == out.tolist() == checksums(src, origins, 296, 2).tolist()


def test_numbers_come_in_any_buffer_of_64_bits(moving: ModuleType) -> None:
    src, out = noise(64), bytearray(16)
    seeds = np.array([3, 4], dtype=np.uint64)
    moving.checksums(src, array("q", [0, 32]), 32, 1, seeds.tobytes(), out)
    assert out == checksums(src, numbers(0, 32), 32, 1, seeds).tobytes()
    moving.copy(memoryview(bytearray(64)), numbers(0, 32).tobytes(), src, numbers(0, 32).view(np.uint64), 32)
    unaligned = memoryview(b"." + numbers(0, 32).tobytes())[1:]
    again = bytearray(17)
    moving.checksums(src, unaligned, 32, 1, seeds.tobytes(), memoryview(again)[1:])
    assert again[1:] == out


MEMORY = 64


def refusals() -> dict[str, tuple[str, Callable[[Any, bytearray, Any], Any]]]:
    """By name: what it says, and a call with a memory to write to and a place for two checksums."""
    src, two = noise(MEMORY), numbers(0, 16)
    return {
        "dst outside": ("dst_offsets: piece 1", lambda m, d, o: m.copy(d, numbers(0, 49), src, two, 16)),
        "dst negative": ("at offset -1", lambda m, d, o: m.copy(d, numbers(0, -1), src, two, 16)),
        "src outside": ("src_offsets: piece 1", lambda m, d, o: m.copy(d, two, src, numbers(0, 49), 16)),
        "beyond 64 bits": ("outside", lambda m, d, o: m.copy(d, two, src, numbers(0, 2**63 - 1), 16)),
        "larger than memory": ("outside", lambda m, d, o: m.copy(d, numbers(0), src, numbers(0), 65)),
        "no bytes": ("at least one byte", lambda m, d, o: m.copy(d, two, src, two, 0)),
        "unlike": ("1 source pieces for 2", lambda m, d, o: m.copy(d, two, src, numbers(0), 16)),
        "32 bits": ("format i", lambda m, d, o: m.copy(d, two.astype(np.int32), src, two, 16)),
        "floats": ("format d", lambda m, d, o: m.copy(d, two.astype(float), src, two, 16)),
        "big-endian": ("format >", lambda m, d, o: m.copy(d, two.astype(">i8"), src, two, 16)),
        "half a number": ("format B", lambda m, d, o: m.copy(d, bytes(12), src, two, 16)),
        "read-only": ("dst is read-only", lambda m, d, o: m.copy(bytes(d), two, src, two, 16)),
        "gaps": ("src is not contiguous", lambda m, d, o: m.copy(d, two, noise(200)[::2], two, 16)),
        "number gaps": ("not contiguous", lambda m, d, o: m.copy(d, numbers(*range(4))[::2], src, two, 16)),
        "checked outside": (
            "dst_offsets",
            lambda m, d, o: m.copy_checked(d, numbers(0, 49), src, two, 16, 1, None, o),
        ),
        "checked, many sums": (
            "out has 2 numbers for 1 blocks",
            lambda m, d, o: m.copy_checked(d, two, src, two, 16, 2, None, o),
        ),
        "checked, odd pieces": (
            "multiple of 8",
            lambda m, d, o: m.copy_checked(d, two, src, two, 12, 2, None, o),
        ),
        "checked, few seeds": (
            "seeds has 1 numbers for 2",
            lambda m, d, o: m.copy_checked(d, two, src, two, 16, 1, bytes(8), o),
        ),
        "sums, part of a block": ("not a multiple", lambda m, d, o: m.checksums(src, two, 16, 3, None, o)),
        "sums, no pieces to a block": (
            "not a multiple",
            lambda m, d, o: m.checksums(src, two, 16, 0, None, o),
        ),
        "sums outside": (
            "offsets: piece 1",
            lambda m, d, o: m.checksums(src, numbers(0, 49), 16, 1, None, o),
        ),
        "sums, read-only": ("out is", lambda m, d, o: m.checksums(src, two, 16, 1, None, bytes(16))),
        "send outside": ("piece 1", lambda m, d, o: m.send(0, src, numbers(0, 49), 16, 0, 8)),
        "send from the end": ("from byte 32 of 32", lambda m, d, o: m.send(0, src, two, 16, 32, 1)),
        "send from before": ("from byte -1", lambda m, d, o: m.send(0, src, two, 16, -1, 1)),
        "send nothing": ("invalid range: 0 bytes", lambda m, d, o: m.send(0, src, two, 16, 0, 0)),
        "receive outside": ("piece 1", lambda m, d, o: m.receive(0, d, numbers(0, 49), 16, 0, 8)),
        "receive, read-only": ("dst is", lambda m, d, o: m.receive(0, bytes(d), two, 16, 0, 8)),
        "receive, no pieces": ("of 0", lambda m, d, o: m.receive(0, d, numbers(), 16, 0, 8)),
    }


@pytest.mark.parametrize("name", refusals())
def test_a_call_that_is_refused_has_changed_nothing(moving: ModuleType, name: str) -> None:
    why, call = refusals()[name]
    dst, out = bytearray(b"." * MEMORY), np.full(2, 7, dtype=np.uint64)
    with pytest.raises(ValueError, match=why):
        call(moving, dst, out)
    assert dst == b"." * MEMORY
    assert out.tolist() == [7, 7]
    dst.append(0)  # the buffer is released


def test_what_is_no_buffer(moving: ModuleType) -> None:
    for arguments in ((5, numbers(0), b".", numbers(0)), (bytearray(1), [0], b".", numbers(0))):
        with pytest.raises(TypeError):
            moving.copy(*arguments, 1)


def test_blocks_of_one_memory(moving: ModuleType) -> None:
    memory = bytearray(b"aabbccdd")
    moving.copy(memory, numbers(0, 2), memory, numbers(6, 4), 2)
    assert memory == b"ddccccdd"
    moving.copy(memoryview(memory)[:4], numbers(2), memoryview(memory)[4:], numbers(2), 2)
    assert memory == b"ddddccdd"


@pytest.mark.parametrize(
    ("places", "origins"), [([1], [0]), ([0], [1]), ([0], [0]), ([0, 5], [3, 6]), ([4, 0], [2, 5])]
)
def test_no_piece_is_written_over_one_that_is_read(
    moving: ModuleType, places: list[int], origins: list[int]
) -> None:
    whole, out = bytearray(b"....aabbccdd"), np.zeros(len(places), dtype=np.uint64)
    part = memoryview(whole)[4:]
    to, read = numbers(*places), numbers(*origins)
    for dst, dst_offsets, src, src_offsets in (
        (part, to, part, read),
        (part, to, whole, read + 4),
        (whole, to + 4, part, read),
    ):
        with pytest.raises(ValueError, match="dst and src overlap"):
            moving.copy(dst, dst_offsets, src, src_offsets, 2)
        with pytest.raises(ValueError, match="dst and src overlap"):
            moving.copy_checked(dst, dst_offsets, src, src_offsets, 2, 1, None, out)
    assert whole == b"....aabbccdd"


def test_sums_are_of_what_arrived_while_the_source_changes(moving: ModuleType) -> None:
    size, count = 1 << 16, 64
    src, dst, out = noise(size), np.zeros(size * count, dtype=np.uint8), np.zeros(count, dtype=np.uint64)
    origins, places = np.zeros(count, dtype=np.int64), np.arange(count, dtype=np.int64) * size
    is_done = threading.Event()

    def change() -> None:
        while not is_done.is_set():
            np.add(src, 1, out=src)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(10):
            moving.copy_checked(dst, places, src, origins, size, 1, None, out)
            assert out.tolist() == checksums(dst, places, size).tolist()
    finally:
        is_done.set()
        thread.join()


def test_through_a_socket(moving: ModuleType, pair: Pair) -> None:
    src, dst = noise(1000), np.zeros(1000, dtype=np.uint8)
    origins, places = numbers(0, 100, 500, 250), numbers(900, 100, 200, 0)
    assert moving.send(pair[0].fileno(), src, origins, 100, 30, 250) == 250
    assert moving.receive(pair[1].fileno(), dst, places, 100, 30, 100) == 100
    assert moving.receive(pair[1].fileno(), dst, places, 100, 130, 10**9) == 150
    expected = np.zeros(1000, dtype=np.uint8)
    expected[930:1000] = src[30:100]
    expected[100:200] = src[100:200]
    expected[200:280] = src[500:580]
    assert (dst == expected).all()


def test_a_socket_that_is_full_or_empty(moving: ModuleType, pair: Pair) -> None:
    src = noise(1 << 20)
    with pytest.raises(BlockingIOError):
        moving.receive(pair[1].fileno(), bytearray(8), numbers(0), 8, 0, 8)
    sent = 0
    with pytest.raises(BlockingIOError):
        while sent < 1 << 24:
            sent += moving.send(pair[0].fileno(), src, numbers(*[0] * 16), 1 << 20, sent, 1 << 24)
    assert 0 < sent < 1 << 24


def test_a_peer_that_has_closed(moving: ModuleType, pair: Pair) -> None:
    pair[0].send(b"last")
    pair[0].close()
    dst = bytearray(8)
    assert moving.receive(pair[1].fileno(), dst, numbers(0), 8, 0, 8) == 4
    assert moving.receive(pair[1].fileno(), dst, numbers(0), 8, 4, 4) == 0
    assert dst == b"last\0\0\0\0"
    with pytest.raises(BrokenPipeError):
        moving.send(pair[1].fileno(), b"12345678", numbers(0), 8, 0, 8)
    pair[1].close()
    for call in (moving.send, moving.receive):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call(pair[1].fileno(), bytearray(8), numbers(0), 8, 0, 8)


def test_a_closed_peer_does_not_kill_the_process(moving: ModuleType) -> None:
    source = f"""
import signal, socket
from array import array
from {moving.__name__} import send
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
left, right = socket.socketpair()
right.close()
try:
    send(left.fileno(), b"12345678", array("q", [0]), 8, 0, 8)
except BrokenPipeError:
    print("told")
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=50)
    assert done.stdout == "told\n", done.stderr


def test_more_ranges_than_a_system_call_takes(moving: ModuleType, pair: Pair) -> None:
    count = 3000
    src, dst = noise(16 * count), np.zeros(16 * count, dtype=np.uint8)
    offsets = np.arange(count, dtype=np.int64) * 16
    sent = received = 0
    while sent < 8 * count:
        sent += moving.send(pair[0].fileno(), src, offsets, 8, sent, 10**9)
    while received < 8 * count:
        received += moving.receive(pair[1].fileno(), dst, offsets[::-1].copy(), 8, received, 10**9)
    assert (dst.reshape(-1, 16)[::-1, :8] == src.reshape(-1, 16)[:, :8]).all()
    assert not dst.reshape(-1, 16)[:, 8:].any()


def test_a_socket_that_blocks_is_waited_for_once(moving: ModuleType, pair: Pair) -> None:
    dst = np.zeros(16 * 2000, dtype=np.uint8)
    offsets = np.arange(2000, dtype=np.int64) * 16
    pair[0].send(b"x" * 8 * 1024)  # as many ranges as go into one system call
    pair[1].setblocking(True)
    assert moving.receive(pair[1].fileno(), dst, offsets, 8, 0, 10**9) == 8 * 1024


def test_a_wait_goes_on_after_a_signal(moving: ModuleType, pair: Pair) -> None:
    pair[1].setblocking(True)
    before = signal.signal(signal.SIGUSR1, lambda *_: pair[0].send(b"12345678"))
    caller = threading.get_ident()
    thread = threading.Timer(0.1, lambda: signal.pthread_kill(caller, signal.SIGUSR1))
    thread.start()
    dst = bytearray(8)
    try:
        assert moving.receive(pair[1].fileno(), dst, numbers(0), 8, 0, 8) == 8
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert dst == b"12345678"


def test_a_signal_that_ends_the_wait(moving: ModuleType, pair: Pair) -> None:
    def refuse(*_: object) -> None:
        raise KeyError("enough")

    pair[1].setblocking(True)
    before = signal.signal(signal.SIGUSR1, refuse)
    caller = threading.get_ident()
    thread = threading.Timer(0.1, lambda: signal.pthread_kill(caller, signal.SIGUSR1))
    try:
        with pytest.raises(KeyError, match="enough"):
            thread.start()
            moving.receive(pair[1].fileno(), bytearray(8), numbers(0), 8, 0, 8)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(native is None, reason="there is no native module here")
def test_the_forms_of_this_cpu() -> None:
    assert native.FORMS[0] == "plain"
    with pytest.raises(ValueError, match="unknown implementation 'sse9'"):
        native.use_form("sse9")


def test_without_the_native_module_the_python_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvolt.transfer.memory._bytes_native", None)
    spec = importlib.util.find_spec("kvolt.transfer.memory.block_bytes")
    assert spec is not None
    assert spec.loader is not None
    select_blocks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(select_blocks)
    assert not select_blocks.IS_NATIVE
    assert select_blocks.copy is bytes_python.copy
