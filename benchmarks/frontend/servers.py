"""CPU per event of HTTP servers that stream: kvolt's own protocol on httptools, uvicorn, granian.

    python -m benchmarks.frontend.servers

Each server is one process with one event loop. A ticker in it makes a step every few milliseconds: one event of an
OpenAI chat stream for every open response, the same bytes everywhere. The event reaches the response in each server's
fastest way: a direct write from the ticker (kvolt), an await on `send` in the request's task (ASGI, RSGI). CPU is the
server's, user and system, over all responses of a round; the client is another process and reads everything. Rounds of
the servers are interleaved. Servers that are not installed (`pip install kvolt[bench]`) are left out of a smoke run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys

from benchmarks.harness import BrokenRun, Missing, parser_for, report, run, spread, table
from benchmarks.meters import Meter
from benchmarks.processes import Processes, clean_environ, free_port

SERVERS = ("kvolt", "uvicorn", "granian")


def main() -> None:
    options = parser_for(__file__, __doc__, results=None).parse_args()
    missing = [name for name in SERVERS if importlib.util.find_spec(name) is None]
    if missing and not options.smoke:
        raise Missing(f"{' and '.join(missing)}: pip install kvolt[bench]")
    servers = [name for name in SERVERS if name not in missing]
    # Concurrent connections, events of a response, responses per connection and round, rounds.
    connections, tokens, responses, rounds = (4, 8, 1, 1) if options.smoke else (64, 256, 4, 5)
    event_us: dict[str, list[float]] = {name: [] for name in servers}
    request_us: dict[str, list[float]] = {name: [] for name in servers}
    rss_bytes: dict[str, int] = {}
    with Processes("servers") as processes:
        running = {name: _start(processes, name) for name in servers}
        for _, port in running.values():
            asyncio.run(_load(port, connections, 32, 1))  # warm-up
        num_responses = connections * responses
        for _ in range(rounds):
            for name, (meter, port) in running.items():
                cpu_s = _measure(meter, port, connections, tokens, responses)
                event_us[name].append(1e6 * cpu_s / (num_responses * tokens))
                cpu_s = _measure(meter, port, connections, 1, responses * 8)
                request_us[name].append(1e6 * cpu_s / (num_responses * 8))
                rss_bytes[name] = meter.rss_bytes()
    about = f"{connections} connections, {tokens} events per response, {rounds} rounds"
    body = [
        (name, spread(event_us[name]), spread(request_us[name]), f"{rss_bytes[name] / 1e6:.0f}")
        for name in servers
    ]
    head = "server | CPU us per event | CPU us per request | RSS MB"
    results = {"cpu_us_per_event": event_us, "cpu_us_per_request": request_us, "rss_bytes": rss_bytes}
    report(options, f"{about}\n{table(head, body)}", results)


def _start(processes: Processes, name: str) -> tuple[Meter, int]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.frontend.server_candidates", name, str(port)]
    process = processes.start(name, command, clean_environ())

    def is_ready() -> bool:
        try:
            asyncio.run(_load(port, 1, 1, 1))
        except OSError:
            return False
        return True

    processes.wait_for(is_ready, "answer")
    return Meter([process.pid]), port


def _measure(meter: Meter, port: int, connections: int, tokens: int, responses: int) -> float:
    before = meter.cpu_s()
    asyncio.run(_load(port, connections, tokens, responses))
    return meter.cpu_s() - before


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
                    raise BrokenRun(f"{num_events} events instead of {tokens}")
        finally:
            writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))


if __name__ == "__main__":
    run(main)
