"""Which HTTP server carries tokens for the least CPU: our own protocol on httptools, uvicorn, granian.

usage: python -m benchmarks.frontend.servers [--connections 64] [--tokens 256] [--rounds 5] [--out FILE]

Each server is one process with one event loop. A ticker in it makes a step every few milliseconds: one
event of an OpenAI chat stream for every open response, the same bytes everywhere. How the event reaches
the response is each server's own best way: a direct write from the ticker (ours), an await on `send` in
the request's task (ASGI, RSGI). CPU is the server's, user and system, over all responses of a round; the
client is another process and reads everything. Rounds of the servers are interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ("kvolt", "uvicorn", "granian")
_STEP_S = 0.002
_START_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="events per response")
    parser.add_argument("--responses", type=int, default=4, help="responses per connection and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="keep all figures as JSON")
    options = parser.parse_args()
    running = {name: _start(name, 18100 + number) for number, name in enumerate(SERVERS)}
    figures: dict[str, list[float]] = {name: [] for name in SERVERS}
    requests: dict[str, list[float]] = {name: [] for name in SERVERS}
    memory: dict[str, int] = {}
    try:
        for _, port in running.values():
            asyncio.run(_load(port, options.connections, 32, 1))  # warm-up
        for _ in range(options.rounds):
            for name, (process, port) in running.items():
                cpu_s = _measure(process, port, options.connections, options.tokens, options.responses)
                figures[name].append(cpu_s / (options.connections * options.tokens * options.responses))
                cpu_s = _measure(process, port, options.connections, 1, options.responses * 8)
                requests[name].append(cpu_s / (options.connections * options.responses * 8))
                memory[name] = sum(each.memory_info().rss for each in _family(process))
    finally:
        for process, _ in running.values():
            for each in _family(process):
                each.kill()
            process.wait()
    print(f"{options.connections} connections, {options.tokens} events per response, {options.rounds} rounds")
    print(f"{'server':10} {'CPU us per event':>24} {'CPU us per request':>26} {'RSS MB':>8}")
    for name in SERVERS:
        print(
            f"{name:10} {_spread(figures[name]):>24} {_spread(requests[name]):>26} {memory[name] / 1e6:8.0f}"
        )
    if options.out is not None:
        document = {
            "command": " ".join(["python -m benchmarks.frontend.servers", *sys.argv[1:]]),
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
            "cpu_s_per_event": figures,
            "cpu_s_per_request": requests,
            "rss_bytes": memory,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e6:.2f} ({min(values) * 1e6:.2f}..{max(values) * 1e6:.2f})"


def _start(name: str, port: int) -> tuple[subprocess.Popen[bytes], int]:
    command = [sys.executable, "-m", "benchmarks.frontend.server_candidates", name, str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + _START_S
    while True:
        try:
            asyncio.run(_load(port, 1, 1, 1))
            return process, port
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"{name} did not start") from None
            time.sleep(0.1)


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _measure(
    process: subprocess.Popen[bytes], port: int, connections: int, tokens: int, responses: int
) -> float:
    family = _family(process)
    before = sum(sum(each.cpu_times()[:2]) for each in family)
    asyncio.run(_load(port, connections, tokens, responses))
    return sum(sum(each.cpu_times()[:2]) for each in family) - before


async def _load(port: int, connections: int, tokens: int, responses: int) -> None:
    request = b"POST /?%d HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}" % tokens

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for _ in range(responses):
                writer.write(request)
                num_events, data = 0, b""
                while not data.endswith(b"0\r\n\r\n"):
                    part = await reader.read(1 << 16)
                    if not part:
                        raise OSError("the server hung up")
                    num_events += part.count(b"data: ")
                    data = (data + part)[-16:]
                if num_events != tokens:
                    raise SystemExit(f"{num_events} events in place of {tokens}")
        finally:
            writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))


if __name__ == "__main__":
    main()
