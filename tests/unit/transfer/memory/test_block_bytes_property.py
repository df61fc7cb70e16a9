"""Native and Python do the same with any pieces, and with any sizes that a socket takes at a time."""

from __future__ import annotations

import importlib
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.transfer.memory import block_bytes
from kvolt.transfer.memory import block_bytes_python as bytes_python
from kvolt.transfer.memory.checksum import checksums

native: Any = (
    importlib.import_module("kvolt.transfer.memory._bytes_native") if block_bytes.IS_NATIVE else None
)
BOTH = [bytes_python, *([native] if native else [])]
needs_native = pytest.mark.skipif(native is None, reason="there is no native module here")


@dataclass(frozen=True, slots=True)
class Job:
    """Pieces that may be read twice, and places apart from each other."""

    src: np.ndarray[Any, np.dtype[np.uint8]]
    src_offsets: np.ndarray[Any, np.dtype[np.int64]]
    dst_bytes: int
    dst_offsets: np.ndarray[Any, np.dtype[np.int64]]
    piece_bytes: int
    per_block: int
    seeds: np.ndarray[Any, np.dtype[np.uint64]] | None

    @property
    def num_blocks(self) -> int:
        return len(self.src_offsets) // self.per_block

    def dst(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.full(self.dst_bytes, 0xEE, dtype=np.uint8)


@st.composite
def jobs(draw: st.DrawFn, min_blocks: int = 0) -> Job:
    per_block = draw(st.integers(1, 4))
    piece_bytes = draw(st.integers(1, 70)) * (8 if per_block > 1 or draw(st.booleans()) else 1)
    num_blocks = draw(st.integers(min_blocks, 6))
    count = num_blocks * per_block
    gap, margin = draw(st.sampled_from([0, 0, 1, 8])), draw(st.integers(0, 20))
    slots = draw(st.permutations(range(count))) if draw(st.booleans()) else range(count)
    src = np.random.default_rng(draw(st.integers(0, 9))).integers(
        0, 256, draw(st.integers(piece_bytes, 4 * piece_bytes + 40)), dtype=np.uint8
    )
    last = len(src) - piece_bytes
    if draw(st.booleans()):  # neighbours, as far as there are any
        origins = [piece_bytes * index % (last + 1) for index in range(count)]
    else:
        origins = draw(st.lists(st.integers(0, last), min_size=count, max_size=count))
    seeds = draw(st.none() | st.lists(st.integers(0, 2**64 - 1), min_size=num_blocks, max_size=num_blocks))
    return Job(
        src=src,
        src_offsets=np.array(origins, dtype=np.int64),
        dst_bytes=margin + count * (piece_bytes + gap),
        dst_offsets=np.array([margin + slot * (piece_bytes + gap) for slot in slots], dtype=np.int64),
        piece_bytes=piece_bytes,
        per_block=per_block,
        seeds=None if seeds is None else np.array(seeds, dtype=np.uint64),
    )


def copied(job: Job) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Piece by piece."""
    dst = job.dst()
    for to, origin in zip(job.dst_offsets, job.src_offsets, strict=True):
        dst[to : to + job.piece_bytes] = job.src[origin : origin + job.piece_bytes]
    return dst


@given(job=jobs())
def test_copies_and_checksums(job: Job) -> None:
    expected = copied(job)
    sums = checksums(job.src, job.src_offsets, job.piece_bytes, job.per_block, job.seeds).tolist()
    for moving in BOTH:
        dst, out = job.dst(), np.zeros(job.num_blocks, dtype=np.uint64)
        moving.copy(dst, job.dst_offsets, job.src, job.src_offsets, job.piece_bytes)
        assert (dst == expected).all()
        of_blocks = job.piece_bytes, job.per_block, job.seeds, out
        moving.checksums(job.src, job.src_offsets, *of_blocks)
        assert out.tolist() == sums
        dst, out[:] = job.dst(), 0
        moving.copy_checked(dst, job.dst_offsets, job.src, job.src_offsets, *of_blocks)
        assert (dst == expected).all()
        assert out.tolist() == sums


@needs_native
@given(data=st.binary(max_size=5000), skipped=st.integers(0, 9), seed=st.integers(0, 2**64 - 1))
def test_all_forms_sum_alike(data: bytes, skipped: int, seed: int) -> None:
    memory, size = bytes(skipped) + data, max(len(data), 1)
    if not data:
        memory += b"."
    offsets, seeds = np.array([skipped], dtype=np.int64), np.array([seed], dtype=np.uint64)
    expected = checksums(memory, offsets, size, 1, seeds)
    try:
        for form in native.FORMS:
            native.use_form(form)
            out = np.zeros(1, dtype=np.uint64)
            native.checksums(memory, offsets, size, 1, seeds, out)
            assert out == expected
    finally:
        native.use_form(native.FORMS[-1])


@given(job=jobs(min_blocks=1), data=st.data())
def test_through_a_socket_in_any_steps(job: Job, data: st.DataObject) -> None:
    """Each side is either implementation at each step; what was sent is received before a socket could be full."""
    total = len(job.src_offsets) * job.piece_bytes
    dst = job.dst()
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        sent = received = 0
        while received < total:
            most = data.draw(st.integers(1, total) | st.just(2**40))
            moving = data.draw(st.sampled_from(BOTH))
            if received == sent or (sent < total and data.draw(st.booleans())):
                step = moving.send(left.fileno(), job.src, job.src_offsets, job.piece_bytes, sent, most)
                assert step == min(most, total - sent)
                sent += step
            else:
                step = moving.receive(right.fileno(), dst, job.dst_offsets, job.piece_bytes, received, most)
                assert step == min(most, sent - received)
                received += step
    assert (dst == copied(job)).all()


@given(job=jobs(min_blocks=1), data=st.data())
def test_an_offset_outside_is_refused_and_nothing_changes(job: Job, data: st.DataObject) -> None:
    is_source = data.draw(st.booleans())
    places = (job.src_offsets if is_source else job.dst_offsets).copy()
    end = (len(job.src) if is_source else job.dst_bytes) - job.piece_bytes
    places[data.draw(st.integers(0, len(places) - 1))] = data.draw(
        st.sampled_from([-1, end + 1, -(2**63), 2**63 - 1])
    )
    to, origins = (job.dst_offsets, places) if is_source else (places, job.src_offsets)
    out = np.full(job.num_blocks, 5, dtype=np.uint64)
    left, right = socket.socketpair()
    with left, right:
        left.send(b"x" * 100)
        left.setblocking(False)
        right.setblocking(False)
        for moving in BOTH:
            dst = job.dst()
            of_blocks = job.piece_bytes, job.per_block, job.seeds, out
            calls = [
                lambda m=moving, d=dst: m.copy(d, to, job.src, origins, job.piece_bytes),
                lambda m=moving, d=dst, b=of_blocks: m.copy_checked(d, to, job.src, origins, *b),
            ]
            if is_source:
                calls += [
                    lambda m=moving, b=of_blocks: m.checksums(job.src, origins, *b),
                    lambda m=moving: m.send(right.fileno(), job.src, origins, job.piece_bytes, 0, 10),
                ]
            else:
                calls.append(lambda m=moving, d=dst: m.receive(right.fileno(), d, to, job.piece_bytes, 0, 10))
            for call in calls:
                with pytest.raises(ValueError, match="lies outside"):
                    call()
            assert (dst == 0xEE).all()
            assert (out == 5).all()
        assert right.recv(1000) == b"x" * 100
        with pytest.raises(BlockingIOError):
            left.recv(1)


@given(
    places=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    origins=st.lists(st.integers(0, 40), min_size=5, max_size=5),
    size=st.integers(1, 6),
)
def test_copies_inside_one_memory(places: list[int], origins: list[int], size: int) -> None:
    origins = origins[: len(places)]
    overlap = any(abs(to - origin) < size for to in places for origin in origins)
    to, read = np.array(places, dtype=np.int64), np.array(origins, dtype=np.int64)
    found = []
    for moving in BOTH:
        memory = bytearray(range(50))
        if overlap:
            with pytest.raises(ValueError, match="dst and src overlap"):
                moving.copy(memory, to, memory, read, size)
            assert memory == bytes(range(50))
        else:
            moving.copy(memory, to, memory, read, size)
            found.append(memory)
    assert all(memory == found[0] for memory in found)
    if found and len(places) == 1:
        assert found[0][places[0] : places[0] + size] == bytes(range(origins[0], origins[0] + size))
