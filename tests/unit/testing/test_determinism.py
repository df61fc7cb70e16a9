"""A run is a function of its seed: the same log, byte for byte, in processes with other hash seeds."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import asyncio, random, sys
from kvolt.core.errors import ConnectFailed
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.loop import run_virtual
from kvolt.testing.virtual.network import VirtualNetwork
from kvolt.testing.virtual.ports import VirtualProcess


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)


class Sink(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport


async def talk(process, peer, network):
    while process.clock.monotonic() < 10:
        try:
            sink = await process.network.connect(f"{peer}:7000", Sink, 3.0)
        except ConnectFailed as error:
            network.note(f"{process.name}: {error}")
        else:
            for _ in range(20):
                sink.transport.write(process.rng.randbytes(process.rng.randint(1, 400)))
                await asyncio.sleep(process.rng.random() / 10)
            sink.transport.abort()
        await asyncio.sleep(process.rng.random())


async def main():
    seed = int(sys.argv[1])
    profile = LinkProfile(jitter_s=0.01, bytes_per_s=1e5, window_bytes=5000, rechunk=True)
    network = VirtualNetwork(random.Random(seed), profile=profile, log=print)
    names = ["red", "green", "blue", "grey"]
    task_group = TaskGroup("talk")
    for name in names:
        process = VirtualProcess.on(network, name, seed)
        await process.network.listen(f"{name}:7000", Echo)
        for peer in names:
            task_group.start(talk(process, peer, network), f"{name}-{peer}")
    for step in range(10):
        await asyncio.sleep(1)
        a, b = network.rng.sample(names, 2)
        network.rng.choice([
            lambda: network.cut(a, b, silent=False),
            lambda: network.partition(a, b),
            lambda: network.heal(a, b),
            lambda: network.pause(a),
            lambda: network.resume(a),
            lambda: network.slow(a, b, 0.05, 2e4),
        ])()
    await task_group.close()
    network.close()

run_virtual(main)
"""


def log_of(seed: int, hash_seed: str) -> bytes:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(seed)]
    return subprocess.run(command, env=environment, capture_output=True, check=True, timeout=50).stdout


def test_one_seed_gives_one_log_whatever_the_hash_seed() -> None:
    first = log_of(seed=11, hash_seed="1")
    assert first.count(b"\n") > 1000
    assert log_of(seed=11, hash_seed="2") == first
    assert log_of(seed=12, hash_seed="1") != first
