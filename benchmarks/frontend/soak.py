"""Soak of the frontend: 512 connections with random disconnects; memory must stay flat and nothing be left behind.

    python -m benchmarks.frontend.soak [--minutes 10]

A frontend and two simulated workers; the connections send chats, whole and streamed, of random length, with and without
stop strings, tools and log probabilities; a third of the clients disconnect at a random moment, before the answer, in
the middle of a stream or of their own request. Every few seconds the frontend's memory, file descriptors, tasks and
open requests are read. At the end all clients leave, and everything open must return to its value before the first.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time

import msgspec
import psutil
from benchmarks.harness import goal, parser_for, report, run
from benchmarks.processes import KVOLT, Processes, free_port, metric_total

_WARM_UP_SHARE = 0.3
_MAX_GROWTH = 1.05
_HANG_UP_SHARE = 0.33
_SETTLE_S = 20.0
_COUNTED = ("whole", "streamed", "hung_up", "errors")


class Sample(msgspec.Struct, frozen=True):
    """State of the frontend at one moment."""

    at_s: float
    rss_mb: float
    fds: int
    active: float
    calls: float
    tasks: float


def main() -> int:
    parser = parser_for(__file__, __doc__, results=None)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    minutes, num_connections = (0.04, 8) if options.smoke else (options.minutes, 512)
    with Processes("soak") as processes:
        env, port = processes.environ(), free_port()
        process = processes.start("frontend", [*KVOLT, "frontend", "--port", str(port)], env)
        for number in range(2):
            worker = ("worker", "sim-tiny", "--name", f"worker-{number}", "--arg", "speed=5")
            processes.start(f"worker-{number}", [*KVOLT, *worker], env)
        processes.wait_workers(port, 2)
        frontend = psutil.Process(process.pid)
        asyncio.run(_warm_up(port))
        before = _sample(port, frontend, 0.0)
        counts, samples = asyncio.run(_soak(port, frontend, minutes, num_connections))
        after = _settled(port, frontend, before)
    warm = [sample for sample in samples if sample.at_s >= minutes * 60 * _WARM_UP_SHARE]
    first, last = warm[: len(warm) // 4 or 1], warm[-(len(warm) // 4 or 1) :]
    growth = _mean(last) / _mean(first)
    verdicts = [
        (f"memory after warm-up grew by at most {_MAX_GROWTH}", growth <= _MAX_GROWTH, f"{growth:.3f}"),
        ("file descriptors as before", after.fds <= before.fds, f"{before.fds} before, {after.fds} after"),
        ("no open request", after.active == 0, f"{after.active:.0f}"),
        ("no open call to a worker", after.calls <= before.calls, f"{after.calls:.0f}"),
        (
            "tasks as before",
            after.tasks <= before.tasks,
            f"{before.tasks:.0f} before, {after.tasks:.0f} after",
        ),
    ]
    lines = [f"requests: {counts}"]
    lines += [
        f"{each.at_s:6.0f} s  {each.rss_mb:7.1f} MB  {each.fds:5d} fds  {each.active:5.0f} active"
        f"  {each.tasks:5.0f} tasks"
        for each in samples[:: max(len(samples) // 20, 1)]
    ]
    lines += [goal(*verdict) for verdict in verdicts]
    results = {"requests": counts, "growth": growth, "before": before, "after": after, "samples": samples}
    report(options, "\n".join(lines), results)
    return 0 if all(met for _, met, _ in verdicts[1 if options.smoke else 0 :]) else 1


def _mean(samples: list[Sample]) -> float:
    return sum(sample.rss_mb for sample in samples) / len(samples)


def _sample(port: int, frontend: psutil.Process, at_s: float) -> Sample:
    url = f"http://127.0.0.1:{port}"
    return Sample(
        at_s=at_s,
        rss_mb=frontend.memory_info().rss / 1e6,
        fds=frontend.num_fds(),
        active=metric_total(url, "kvolt_frontend_active_requests"),
        calls=metric_total(url, "kvolt_plane_streams_active"),
        tasks=metric_total(url, "kvolt_tasks"),
    )


def _settled(port: int, frontend: psutil.Process, before: Sample) -> Sample:
    deadline = time.monotonic() + _SETTLE_S
    while True:
        after = _sample(port, frontend, 0.0)
        settled = after.fds <= before.fds and after.tasks <= before.tasks and not after.active
        if settled or time.monotonic() > deadline:
            return after
        time.sleep(0.5)


# --- the clients


async def _soak(
    port: int, frontend: psutil.Process, minutes: float, num_connections: int
) -> tuple[dict[str, int], list[Sample]]:
    counts = dict.fromkeys(_COUNTED, 0)
    samples: list[Sample] = []
    started = time.monotonic()
    end = started + minutes * 60

    async def client(number: int) -> None:
        rng = random.Random(f"1/{number}")
        while time.monotonic() < end:
            try:
                await _connection(port, rng, counts, end)
            except (OSError, asyncio.IncompleteReadError):
                counts["errors"] += 1
                await asyncio.sleep(0.1)

    async def watch() -> None:
        interval_s = max(minutes / 2, 1.0)
        while time.monotonic() < end:
            await asyncio.sleep(interval_s)
            at_s = time.monotonic() - started
            samples.append(await asyncio.to_thread(_sample, port, frontend, at_s))

    await asyncio.gather(watch(), *(client(number) for number in range(num_connections)))
    return counts, samples


async def _warm_up(port: int) -> None:
    """A request for each worker: connections to them are made when they are needed, and stay."""
    counts = dict.fromkeys(_COUNTED, 0)
    rng = random.Random(0)
    while counts["whole"] + counts["streamed"] < 8:
        await _connection(port, rng, counts, time.monotonic() + 0.5)
    await asyncio.sleep(1.0)


async def _connection(port: int, rng: random.Random, counts: dict[str, int], end: float) -> None:
    """Requests on one connection, until the client disconnects or time is up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while time.monotonic() < end:
            body = _body(rng)
            data = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            data += b"content-length: %d\r\n\r\n%b" % (len(body), body)
            if rng.random() < _HANG_UP_SHARE:
                counts["hung_up"] += 1
                writer.write(data[: rng.choice((len(data) // 2, len(data)))])
                await asyncio.sleep(rng.expovariate(4))
                return
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if length:
                await reader.readexactly(int(length[1]))
                counts["whole" if head.startswith(b"HTTP/1.1 200") else "errors"] += 1
            else:
                while not (await reader.readuntil(b"\r\n")).startswith(b"0\r\n"):
                    pass
                await reader.readexactly(2)
                counts["streamed"] += 1
    finally:
        writer.close()


def _body(rng: random.Random) -> bytes:
    words = " ".join(
        rng.choice(("water", "house", "paper", "light", "story")) for _ in range(rng.randint(5, 300))
    )
    body: dict[str, object] = {
        "model": "sim-tiny",
        "messages": [{"role": "user", "content": f"{rng.random()} {words}"}],
        "max_tokens": rng.randint(1, 200),
        "stream": rng.random() < 0.7,
    }
    if rng.random() < 0.2:
        body["stop"] = [" light", "never said"]
    if rng.random() < 0.1:
        body |= {"logprobs": True, "top_logprobs": 3}
    if rng.random() < 0.1:
        body["n"] = 2
    if rng.random() < 0.2:
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    return json.dumps(body).encode()


if __name__ == "__main__":
    run(main)
