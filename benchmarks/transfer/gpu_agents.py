"""Blocks of a GPU from one process to another by two transfer agents: is it right, and how near its limits is it?

Needs a CUDA device with 12 GiB, torch and Triton. From the repository's root, about a minute:

    PYTHONPATH=src python3 -u -m benchmarks.transfer.gpu_agents

A second process owns a slab on the same GPU and offers scattered blocks; this one reads them into scattered places of
its own, with checksums on both sides, and waits for the answer: what is measured is a whole read, from the call to the
awaited end. The limit is one copy of as many bytes out of the other process's memory, in the same round. `staged` is
what peers without CUDA IPC do: to pinned memory, over TCP, and up again; beside a copy on the device all the same. At
the end the other process is killed while it is read from. The exit status is 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from benchmarks.harness import Missing, parser_for, report, run

from kvolt.core.errors import KvoltError
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.cuda.memory import CudaMemory
from kvolt.transfer.memory.device_memory import DeviceHandle
from kvolt.transfer.memory.slabs import Slab

SIZES = (16 << 10, 64 << 10, 256 << 10, 2 << 20)
TOTAL, STAGED_TOTAL = 1 << 30, 128 << 20
"""Bytes of a read."""
ROUNDS = 9
DEADLINE_S = 60.0


def content(num_bytes: int) -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(7)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda", generator=draw)


def places(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).permutation(2 * count)[:count]


# --- the owner


def own(num_bytes: int) -> None:
    """A request a line: JSON with the size of blocks and whether by TCP; answered with a ticket."""
    tensor = content(num_bytes)
    torch.cuda.synchronize()
    memories = {near: CudaMemory.shared(tensor) for near in (True, False)}
    agents = {near: TransferAgent(TransferOptions(shared_memory=near)) for near in memories}
    for memory in memories.values():
        memory.warm_up()
    print(msgspec.json.encode(memories[True].handle).decode(), flush=True)
    offers = []
    for line in sys.stdin:
        job = json.loads(line)
        slab = Slab.on_device(memories[job["near"]], job["block_bytes"])
        offer = agents[job["near"]].offer(slab, places(job["count"], 1), DEADLINE_S)
        offers.append((slab, offer))
        print(offer.ticket.hex(), flush=True)


@contextmanager
def owner(num_bytes: int) -> Iterator[tuple[subprocess.Popen[str], DeviceHandle]]:
    command = [sys.executable, "-m", "benchmarks.transfer.gpu_agents", "--own", str(num_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, msgspec.json.decode(process.stdout.readline(), type=DeviceHandle)
    finally:
        process.kill()
        process.wait()


def ticket_of(process: subprocess.Popen[str], block_bytes: int, count: int, near: bool) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    job = {"block_bytes": block_bytes, "count": count, "near": near}
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    return bytes.fromhex(process.stdout.readline())


# --- the reader


async def rates(
    process: subprocess.Popen[str], handle: DeviceHandle, near: bool, total: int
) -> dict[str, Any]:
    """By size of blocks. AssertionError where bytes are not what they were, or came another way."""
    agent = TransferAgent(TransferOptions(shared_memory=near))
    target = torch.zeros(2 * total, dtype=torch.uint8, device="cuda")
    memory = CudaMemory(target)
    memory.warm_up()
    theirs = memory.open(handle)
    expected = content(2 * TOTAL)
    results: dict[str, Any] = {}
    for size in SIZES:
        count = total // size
        slab, into = Slab.on_device(memory, size), places(count, 2)
        took, limits, paths = [], [], set()
        for _ in range(ROUNDS):
            target.zero_()
            torch.cuda.synchronize()
            ticket = ticket_of(process, size, count, near)
            started = time.perf_counter()
            paths.add(await agent.read(ticket, slab, into, DEADLINE_S))
            took.append(time.perf_counter() - started)
            rows, source = target.view(-1, size), expected.view(-1, size)
            assert torch.equal(rows[torch.from_numpy(into)], source[torch.from_numpy(places(count, 1))])
            limits.append(_copy_s(target, theirs.tensor, total))
        assert paths == {"cuda-ipc" if near else "tcp"}, paths
        gbps, limit = total / statistics.median(took) / 1e9, total / statistics.median(limits) / 1e9
        name = f"{size >> 10} KiB"
        results[name] = {
            "gbps": gbps,
            "limit_gbps": limit,
            "of the limit": gbps / limit,
            "path": sorted(paths),
        }
        print(
            f"  {name}: {gbps:,.1f} GB/s, {gbps / limit:.2f} of {limit:,.0f}, by {sorted(paths)}", flush=True
        )
    agent.close()
    theirs.close()
    return results


def _copy_s(target: torch.Tensor, source: torch.Tensor, total: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    target[:total].copy_(source[:total])
    torch.cuda.synchronize()
    return time.perf_counter() - started


async def killed(process: subprocess.Popen[str]) -> str:
    """Results of reads whose owner is killed during them; the device must be usable afterwards."""
    agent = TransferAgent()
    memory = CudaMemory(torch.zeros(2 * TOTAL, dtype=torch.uint8, device="cuda"))
    size = 64 << 10
    tickets = [ticket_of(process, size, TOTAL // size, True) for _ in range(40)]
    slab, into = Slab.on_device(memory, size), places(TOTAL // size, 2)
    await agent.read(tickets[0], slab, into, DEADLINE_S)
    reads = [agent.read(each, slab, into, DEADLINE_S) for each in tickets[1:]]
    await reads[0]
    process.kill()
    outcomes = []
    for read in reads[1:]:
        try:
            await read
            outcomes.append("whole")
        except KvoltError as error:
            outcomes.append(error.code)
    assert set(outcomes) - {"whole"}, "the owner was read from after it was killed"
    torch.cuda.synchronize()
    assert int(torch.ones(1000, device="cuda").sum()) == 1000
    agent.close()
    return ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))


def main() -> None:
    parser = parser_for(__file__, __doc__)
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise Missing("a CUDA device")
    if options.own is not None:
        own(options.own)
        return
    results: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    shift = 6 if options.smoke else 0
    with owner(2 * TOTAL) as (process, handle):
        for name, near, total in (
            ("cuda-ipc", True, TOTAL >> shift),
            ("staged", False, STAGED_TOTAL >> shift),
        ):
            print(name, flush=True)
            results[name] = asyncio.run(rates(process, handle, near, total))
        results["killed"] = asyncio.run(killed(process))
    report(options, f"owner killed under reads: {results['killed']}", results)


if __name__ == "__main__":
    run(main)
