"""Strangers who reach the ports of a running cluster: memory stays bounded, keys stay with their owners, and
requests are served all the while.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from tests.integration.processes import MODEL, PATIENCE_S, Bench, free_port, until_ready

from kvolt.core.endpoints import INSTANCES, decode_instance, encode_instance
from kvolt.core.errors import KeyConflict
from kvolt.runtime.network import split_address
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.wire import FrameKind
from kvolt.transfer.reads.wire import Hello, to_frame

MB = 1 << 20
ASK = {"model": MODEL, "prompt": "Hi", "max_tokens": 5}
HELLO = wire.frame(
    FrameKind.HELLO,
    0,
    wire.encode(
        wire.Hello(
            versions=wire.VERSIONS,
            process="stranger",
            max_frame_bytes=MB,
            max_message_bytes=64 * MB,
            heartbeat_s=1.0,
        )
    ),
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


def open_frame(stream_id: int, chunked: bool) -> bytes:
    opening = wire.Open("stranger", 8, None, {}, chunked, msgspec.Raw(wire.NIL))
    return wire.frame(FrameKind.OPEN, stream_id, wire.encode(opening))


async def connected(address: str) -> asyncio.StreamWriter:
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(HELLO)
    await reader.readexactly(wire.HEADER.size)
    return writer


async def is_answered(url: str) -> bool:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        return (await client.post("/v1/completions", json=ASK)).status_code == 200


async def unfinished(address: str, num_bytes: int) -> None:
    """Four messages of so many bytes, none with its last piece; the answers are never read."""
    writer = await connected(address)
    try:
        writer.write(b"".join(open_frame(stream_id, True) for stream_id in (1, 3, 5, 7)))
        pieces = [
            wire.frame(FrameKind.CHUNK, stream_id, b"\0" + bytes(wire.CHUNK_BYTES))
            for stream_id in (1, 3, 5, 7)
        ]
        for _ in range(num_bytes // wire.CHUNK_BYTES):
            writer.write(b"".join(pieces))
            await writer.drain()
        await asyncio.sleep(1.0)
    finally:
        writer.close()


async def test_messages_that_never_end_do_not_fill_a_worker(bench: Bench) -> None:
    worker = bench.worker("w0")
    _, url = await bench.frontend()
    views = await bench.until_seen("frontend", "w0")
    await until_ready(url)
    assert await is_answered(url)
    memory = psutil.Process(worker.pid)
    before, most = memory.memory_info().rss, 0
    attacks = [asyncio.ensure_future(unfinished(views["w0"].address, 40 * MB)) for _ in range(4)]
    try:
        while not all(attack.done() for attack in attacks):
            most = max(most, memory.memory_info().rss)
            assert await is_answered(url)
            await asyncio.sleep(0.05)
    finally:
        for attack in attacks:
            attack.cancel()
        with contextlib.suppress(OSError):
            await asyncio.gather(*attacks)
    assert most - before < 320 * MB, f"grew by {(most - before) / MB:.0f} MB of 640 that were sent"
    await worker.says("incomplete messages shed")
    assert await is_answered(url)


_AGENT = """
import sys
from kvolt.transfer.agent import TransferAgent
agent = TransferAgent()
print(agent.address.host, agent.address.port, flush=True)
sys.stdin.read()
agent.close()
"""


def test_frames_that_never_end_do_not_fill_a_transfer_agent() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", _AGENT], text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        host, port = process.stdout.readline().split()
        memory = psutil.Process(process.pid)
        before = most = memory.memory_info().rss
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                link = stack.enter_context(socket.create_connection((host, int(port))))
                link.settimeout(PATIENCE_S)
                link.sendall(to_frame(Hello("stranger", "frames")))
                link.recv(4096)
                with contextlib.suppress(ConnectionError):
                    link.sendall((32 * MB).to_bytes(4, "little"))
                    for _ in range(30):
                        link.sendall(bytes(MB))
                        most = max(most, memory.memory_info().rss)
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    assert most - before < 250 * MB, f"grew by {(most - before) / MB:.0f} MB of 600 that were sent"


async def test_a_burst_of_opens_leaves_a_worker_reachable(bench: Bench) -> None:
    bench.worker("w0")
    _, url = await bench.frontend()
    views = await bench.until_seen("frontend", "w0")
    await until_ready(url)
    writer = await connected(views["w0"].address)
    writer.write(b"".join(open_frame(2 * number + 1, False) for number in range(20_000)))
    for _ in range(5):
        assert await is_answered(url)
    writer.close()


async def test_a_stranger_cannot_take_the_key_of_a_joined_worker(bench: Bench) -> None:
    join = f"127.0.0.1:{free_port()}"
    _, url = await bench.frontend("--set", "discovery.kind=file", "--discovery-join-listen", join)
    worker = bench.worker("w0", "--join", join)
    await until_ready(url)
    joined = {"KVOLT_DISCOVERY_JOIN": join, "KVOLT_DISCOVERY_KIND": "join"}
    async with bench.runtime(**joined) as intruder:
        content = await intruder.discovery.get_prefix(INSTANCES)
        lease = await intruder.discovery.lease(5.0)
        num_tried = 0
        for key, value in content.items():
            instance = decode_instance(value)
            if instance is None or instance.process != "w0":
                continue
            num_tried += 1
            fake = msgspec.structs.replace(instance, address="127.0.0.1:1")
            with pytest.raises(KeyConflict):
                await intruder.discovery.put(key, encode_instance(fake), lease)
        assert num_tried > 0
        assert await intruder.discovery.get_prefix(INSTANCES) == content
        for _ in range(3):
            assert await is_answered(url)
    assert worker.exit_code is None
    assert "registration lost" not in worker.err


async def test_a_worker_that_lost_its_key_says_so_and_comes_back(tmp_path: Path) -> None:
    """Its machine stands still until its lease has expired, and another process takes its key."""
    with Bench(tmp_path, KVOLT_DISCOVERY_TTL_S="1.0") as bench:
        join = f"127.0.0.1:{free_port()}"
        _, url = await bench.frontend("--set", "discovery.kind=file", "--discovery-join-listen", join)
        worker = bench.worker("w0", "--join", join)
        await until_ready(url)
        joined = {"KVOLT_DISCOVERY_JOIN": join, "KVOLT_DISCOVERY_KIND": "join"}
        views = await bench.until_seen("frontend", "w0", **joined)
        async with bench.runtime(**joined) as intruder:
            discovery = intruder.discovery
            [key] = [
                key
                for key, value in (await discovery.get_prefix(INSTANCES)).items()
                if (instance := decode_instance(value)) is not None
                and (instance.process, instance.endpoint.endpoint) == ("w0", "generate")
            ]
            lease = await discovery.lease(5.0)
            worker.send(signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        await discovery.put(key, b"taken", lease)
                        break
                    except KeyConflict:
                        await asyncio.sleep(0.1)
            worker.send(signal.SIGCONT)
            await worker.says("registration lost")
            async with httpx.AsyncClient(base_url=f"http://{views['w0'].admin}", timeout=PATIENCE_S) as admin:
                answer = await admin.get("/ready")
                assert answer.status_code == 503
                assert "registration" in answer.text
                await discovery.revoke(lease)
                await worker.says("registration restored")
                async with asyncio.timeout(PATIENCE_S):
                    while (await admin.get("/ready")).status_code != 200:
                        await asyncio.sleep(0.1)
        async with asyncio.timeout(PATIENCE_S):
            while not await is_answered(url):
                await asyncio.sleep(0.2)
