"""Agents with NIXL for the tests of it, in this process and in another.

python nixl_lab.py offer               prints tickets of so many offers of the same blocks, then stays
python nixl_lab.py read TICKET...      reads them one after the other, and prints a line after each
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.nixl.path import Nixl

BLOCK = 4096
NUM = 64
SOON_S = 20.0

PEER_BLOCK = 1 << 16
PEER_NUM = 256
_NUM_OFFERS = 8
_LONG_S = 60.0


def private_slab(num_blocks: int, block_bytes: int, layout: SlabLayout | None = None) -> Slab:
    """That no peer can map: what is read of it comes over NIXL, or else over TCP."""
    return Slab(memoryview(bytearray(num_blocks * block_bytes)), block_bytes, layout=layout)


class Side:
    """A process's agent with a slab."""

    def __init__(self, seed: int = 0, nixl: bool = True, shared_memory: bool = True) -> None:
        self.agent = TransferAgent(TransferOptions(nixl=nixl, shared_memory=shared_memory))
        self.slab = private_slab(NUM, BLOCK)
        self.rows = np.frombuffer(self.slab.memory, dtype=np.uint8).reshape(NUM, BLOCK)
        if seed:
            self.rows[:] = np.random.default_rng(seed).integers(0, 256, self.rows.shape)

    @property
    def nixl(self) -> Nixl:
        found = self.agent._hub.nixl
        assert found is not None
        return found


@contextmanager
def new_sides() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def new(*arguments: object, **options: object) -> Side:
        made.append(Side(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    try:
        yield new
    finally:
        for side in made:
            side.agent.close()


@contextmanager
def mute(*names: Side) -> Iterator[None]:
    """Their NIXL is not driven: what is read of them over NIXL is under way and does not come."""
    for side in names:
        side.nixl._poll_peers = lambda: None  # type: ignore[method-assign]
    yield
    for side in names:
        del side.nixl._poll_peers


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not is_so():
            await asyncio.sleep(0.005)


async def under_way(side: Side, count: int = 1) -> None:
    """So many reads have a part with NIXL."""
    await until(lambda: sum(read._handle is not None for read in list(side.nixl._reads)) == count)


async def in_thread(side: Side, what: Callable[[], object]) -> None:
    done = threading.Event()
    side.agent._hub.progress.call_soon(lambda: (what(), done.set())[1])
    await until(done.is_set)


async def made(*sides: Side) -> None:
    """The NIXL agents exist already and know no peer."""
    for side in sides:
        await in_thread(side, lambda side=side: side.nixl.when_ready(lambda: None))
        await until(lambda side=side: side.nixl.is_ready)


# --- another process


@contextmanager
def peer(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def tickets_of(process: subprocess.Popen[str]) -> list[bytes]:
    assert process.stdout is not None
    return [bytes.fromhex(each) for each in process.stdout.readline().split()]


def peer_content() -> bytes:
    return np.random.default_rng(7).integers(0, 256, PEER_BLOCK * PEER_NUM, dtype=np.uint8).tobytes()


def main(what: str, *tickets: str) -> None:
    agent = TransferAgent(TransferOptions(nixl=True))
    slab = Slab(memoryview(bytearray(PEER_BLOCK * PEER_NUM)), PEER_BLOCK)
    blocks = range(PEER_NUM)
    if what == "offer":
        slab.memory[:] = peer_content()
        print(*(agent.offer(slab, blocks, _LONG_S).ticket.hex() for _ in range(_NUM_OFFERS)), flush=True)
        sys.stdin.read()
    for ticket in tickets:
        print(agent.read(bytes.fromhex(ticket), slab, blocks, _LONG_S).result(_LONG_S), flush=True)
    agent.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
