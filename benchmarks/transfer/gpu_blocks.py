"""Blocks of a GPU's memory, moved and summed: is it right on this device, and how near its limits is it?

Needs a CUDA device with 20 GiB, torch, Triton and numpy. From the repository's root, about a minute:

    PYTHONPATH=src python3 -u -m benchmarks.transfer.gpu_blocks

`--checks` leaves the rates out; `--smoke` runs the checks on the CPU, interpreted, where there is no GPU. Rates are of
bytes moved, median of the rounds, beside the device's own copy of as many bytes in the same round. The exit status is 1
if a check fails.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from benchmarks.harness import Missing, parser_for, report, run
from torch import Tensor

if "--smoke" in sys.argv and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read as the kernels are imported

from kvolt.transfer.cuda.triton_blocks import DeviceBlocks
from kvolt.transfer.memory.checksum import checksums

SHAPES = [(8, 1), (24, 3), (4096, 1), (4096, 4), (16384, 1), (16392, 2), (65536, 2), ((1 << 20) + 16, 1)]
"""Bytes of a piece, pieces of a block."""
SIZES = (16 << 10, 64 << 10, 256 << 10, 2 << 20)
"""Block sizes whose rates are measured."""
KIND = "cuda" if torch.cuda.is_available() else "cpu"


def noise(num_bytes: int, device: str = KIND) -> Tensor:
    draw = torch.Generator(device).manual_seed(num_bytes)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=draw)


def places(count: int, size: int, seed: int) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """Apart from each other in a memory of so many bytes."""
    return np.random.default_rng(seed).permutation(2 * count)[:count] * size, 2 * count * size


def row_offsets(
    pieces: np.ndarray[Any, np.dtype[np.int64]], size: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Offsets of as many contiguous pieces."""
    return np.arange(len(pieces), dtype=np.int64) * size


def host(memory: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return memory.cpu().numpy()


def gathered(memory: Tensor, offsets: np.ndarray[Any, np.dtype[np.int64]], size: int) -> bytes:
    held = host(memory)
    return b"".join(held[offset : offset + size].tobytes() for offset in offsets)


def expect(right: bool, what: str) -> None:
    if not right:
        raise AssertionError(what)


def check_memory(blocks: DeviceBlocks, make: Callable[[int], Tensor]) -> None:
    """Gather into, and scatter from, a memory of some kind; then from slab to slab, and blocks that stay."""
    for size, per_block in SHAPES:
        count = per_block * (12 if size < 1 << 20 else 3)
        offsets, num_bytes = places(count, size, size)
        targets, _ = places(count, size, size + 1)
        slab, other, row = noise(num_bytes), noise(num_bytes), make(count * size)
        seeds = np.arange(count // per_block, dtype=np.uint64) + np.uint64(2**64 - 2)
        sums, data = checksums(host(slab), offsets, size, per_block, seeds), gathered(slab, offsets, size)

        def check(name: str, moved: Any, received: bytes) -> None:
            label = f"{name}: {count} pieces of {size}, {per_block} to a block"  # noqa: B023 - called at once
            expect(moved.checksums().tolist() == sums.tolist(), f"checksums of {label}")  # noqa: B023
            expect(received == data, f"bytes of {label}")  # noqa: B023

        sizes = (size, per_block, seeds)
        packed = row_offsets(offsets, size)
        check("gather", blocks.copy(row, packed, slab, offsets, *sizes), host(row).tobytes())
        untouched = host(other).copy()
        moved = blocks.copy(other, offsets, row, packed, *sizes)
        check("scatter", moved, gathered(other, offsets, size))
        for offset in offsets:
            untouched[offset : offset + size] = host(other)[offset : offset + size]
        expect((untouched == host(other)).all(), f"scatter: other bytes beside pieces of {size}")
        check("copy", blocks.copy(other, targets, slab, offsets, *sizes), gathered(other, targets, size))
        check("checksums", blocks.checksums(slab, offsets, *sizes), data)


def check_own(blocks: DeviceBlocks) -> None:
    check_memory(blocks, lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8, device=KIND))


def check_pinned(blocks: DeviceBlocks) -> None:
    check_memory(blocks, lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True))


def check_registered(blocks: DeviceBlocks) -> None:
    """Memory that other processes can map, made known to CUDA afterwards."""
    with registered(16 << 20) as memory:
        check_memory(blocks, lambda num_bytes: memory[:num_bytes])


@contextmanager
def registered(num_bytes: int) -> Iterator[Tensor]:
    descriptor = os.memfd_create("blocks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    memory = torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8))
    os.close(descriptor)
    cudart = torch.cuda.cudart()
    expect(int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0)) == 0, "cudaHostRegister")
    try:
        yield memory
    finally:
        torch.cuda.synchronize()
        cudart.cudaHostUnregister(memory.data_ptr())


def check_changing_source(blocks: DeviceBlocks) -> None:
    """Check that checksums describe the received bytes while another stream writes to the source."""
    size, count = 1 << 20, 64
    slab, offsets = noise(size * count), np.arange(count, dtype=np.int64) * size
    rows = [torch.zeros(size * count, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    writer = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        for _ in range(400):
            slab.add_(1)
    moved = [blocks.copy(row, row_offsets(offsets, size), slab, offsets, size) for row in rows]
    for row, done in zip(rows, moved, strict=True):
        expect((done.checksums() == checksums(row.numpy(), offsets, size)).all(), "sums of what arrived")
    torch.cuda.synchronize()


def of_peer(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run the function in another process, to which memory is mapped by CUDA IPC, and return its result."""
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    requests, answered = context.Queue(), context.Queue()
    peer = context.Process(target=_answer, args=(requests, answered, work))
    peer.start()
    try:
        requests.put(arguments)
        return answered.get(timeout=300)
    finally:
        requests.put(None)
        peer.join(30)


def _answer(requests: Any, answered: Any, work: Callable[..., Any]) -> None:
    arguments = requests.get()
    answered.put(work(*arguments))
    requests.get()  # memory that was shared must not go before its owner has been answered


def check_ipc(blocks: DeviceBlocks) -> None:
    """Another process reads blocks of this one's memory."""
    size, count = 65536, 32
    offsets, num_bytes = places(count, size, 5)
    slab = noise(num_bytes)
    data, sums = of_peer(_read_as_peer, slab, offsets, size)
    expect(data == gathered(slab, offsets, size), "bytes by CUDA IPC")
    expect(sums == checksums(host(slab), offsets, size).tolist(), "checksums by CUDA IPC")
    expect(sums == blocks.checksums(slab, offsets, size).checksums().tolist(), "checksums at the owner")


def _read_as_peer(slab: Tensor, offsets: Any, size: int) -> tuple[bytes, list[int]]:
    own = torch.zeros(len(offsets) * size, dtype=torch.uint8, device=slab.device)
    in_row = np.arange(len(offsets), dtype=np.int64) * size
    sums = DeviceBlocks(slab.device).copy(own, in_row, slab, offsets, size).checksums().tolist()
    return own.cpu().numpy().tobytes(), sums


def ipc_rates(slab: Tensor, total: int, rounds: int) -> dict[str, Any]:
    """Blocks of another process's memory into this one's, beside one copy of as many bytes of it."""
    blocks = DeviceBlocks(slab.device)
    own = torch.zeros(total, dtype=torch.uint8, device=slab.device)
    results = {}
    for size in SIZES:
        offsets, _ = places(total // size, size, 1)
        into = np.random.default_rng(2).permutation(total // size) * size
        rate, ratio, pairs = beside(
            lambda: blocks.copy(own, into, slab, offsets, size).checksums(),  # noqa: B023 - called at once
            lambda: own.copy_(slab[:total]),
            total,
            rounds,
        )
        results[f"CUDA IPC, {size >> 10} KiB"] = {
            "gbps": rate,
            "times a plain copy": ratio,
            "plain gbps": total / statistics.median(pair[1] for pair in pairs) / 1e9,
        }
    return results


def seconds(work: Callable[[], object]) -> float:
    """On the device, and until the host knows that it is done."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def beside(
    ours: Callable[[], object], plain: Callable[[], object], total: int, rounds: int
) -> tuple[float, float, list[tuple[float, float]]]:
    """GB/s of `ours`, its ratio to a plain copy in the same round, and the seconds of both; medians."""
    seconds(ours), seconds(plain)  # compiles, and pages memory in
    pairs = [(seconds(ours), seconds(plain)) for _ in range(rounds)]
    rate = total / statistics.median(pair[0] for pair in pairs) / 1e9
    return rate, statistics.median(pair[1] / pair[0] for pair in pairs), pairs


def rates(total: int, rounds: int) -> dict[str, Any]:
    blocks, device = DeviceBlocks(torch.device("cuda", torch.cuda.current_device())), "cuda"
    slab, own = noise(2 * total), torch.zeros(total, dtype=torch.uint8, device=device)
    pinned = torch.zeros(total, dtype=torch.uint8, pin_memory=True)
    results: dict[str, Any] = {}
    for size in SIZES:
        offsets, _ = places(total // size, size, 1)
        index, packed = torch.from_numpy(offsets // size).to(device), row_offsets(offsets, size)
        rows, out = slab.view(-1, size), own.view(-1, size)
        works: dict[str, tuple[Callable[[], Any], Callable[[], object]]] = {
            "gather on the device": (
                lambda: blocks.copy(own, packed, slab, offsets, size),  # noqa: B023 - called at once
                lambda: own.copy_(slab[:total]),
            ),
            "scatter on the device": (
                lambda: blocks.copy(slab, offsets, own, packed, size),  # noqa: B023
                lambda: slab[:total].copy_(own),
            ),
            "checksums": (
                lambda: blocks.checksums(slab, offsets, size),  # noqa: B023
                lambda: torch.index_select(rows, 0, index, out=out),  # noqa: B023
            ),
            "gather to the host": (
                lambda: blocks.copy(pinned, packed, slab, offsets, size),  # noqa: B023
                lambda: pinned.copy_(slab[:total], non_blocking=True),
            ),
            "scatter from the host": (
                lambda: blocks.copy(slab, offsets, pinned, packed, size),  # noqa: B023
                lambda: slab[:total].copy_(pinned, non_blocking=True),
            ),
        }
        for name, (ours, plain) in works.items():
            rate, ratio, _ = beside(lambda: ours().checksums(), plain, total, rounds)  # noqa: B023
            other = "index_select" if name == "checksums" else "a plain copy"
            results[f"{name}, {size >> 10} KiB"] = {"gbps": rate, f"times {other}": ratio}
    few, one = np.zeros(1, dtype=np.int64), noise(1 << 16)
    latency = statistics.median(
        seconds(lambda: blocks.copy(own, row_offsets(few, 1 << 16), one, few, 1 << 16).checksums())
        for _ in range(50)
    )
    results["one block of 64 KiB"] = {"us": latency * 1e6}
    return results | of_peer(ipc_rates, slab, total, rounds)


def main() -> int:
    parser = parser_for(__file__, __doc__)
    parser.add_argument("--checks", action="store_true", help="only check; measure no rates")
    options = parser.parse_args()
    if KIND == "cpu" and not options.smoke:
        raise Missing("a CUDA device")
    if options.smoke:
        SHAPES[:] = [(8, 1), (24, 3), (16392, 2)]
    blocks = DeviceBlocks(
        torch.device("cuda", torch.cuda.current_device()) if KIND == "cuda" else torch.device(KIND)
    )
    on_device = [check_pinned, check_registered, check_changing_source, check_ipc] if KIND == "cuda" else []
    wrong: dict[str, str] = {}
    for check in (check_own, *on_device):
        try:
            check(blocks)
            print(f"{check.__name__}: right", flush=True)
        except Exception as error:  # the other checks still run
            wrong[check.__name__] = repr(error)
            print(f"{check.__name__}: WRONG: {error!r}", flush=True)
    device = torch.cuda.get_device_name() if KIND == "cuda" else KIND
    results: dict[str, Any] = {"device": device, "wrong": wrong}
    if KIND == "cuda" and not options.checks:
        total = (64 << 20) if options.smoke else (4 << 30)
        results["rates"] = rates(total, rounds=9)
    lines = [f"{name}: {rate}" for name, rate in results.get("rates", {}).items()]
    report(options, "\n".join([*lines, "some checks failed" if wrong else "all checks passed"]), results)
    return 1 if wrong else 0


if __name__ == "__main__":
    run(main)
