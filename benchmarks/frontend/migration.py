"""One of two workers is killed during a hundred streams: number of complete answers, and length of the pause.

    python -m benchmarks.frontend.migration            both with their defaults, and Dynamo with migration turned on

Run from the repository's root. Each round restarts each system: a frontend and two processes of one mock worker
each, kvolt's at the speed of Dynamo's mocker (the same step times, blocks of 64 tokens, 16,384 of them). When every
client has some tokens one worker gets SIGKILL. A gap is the time between two reads of a client with events: the worst
one of all streams is reported. kvolt's simulated answers depend on nothing but their prompts, so their texts are
compared with those that the other worker gives afterwards, undisturbed; Dynamo's are random, and only their tokens
are counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import msgspec
from benchmarks.frontend import tiny_model
from benchmarks.frontend.edges import (
    DYNAMO_NAME,
    KVOLT_NAME,
    Dynamo,
    dynamo_environ,
    installed_dynamo,
    mocker_sizes,
    model_arguments,
    model_in,
    start_dynamo_frontend,
    start_mockers,
    start_workers,
)
from benchmarks.frontend.prompts import chat_request, few_words
from benchmarks.harness import (
    BrokenRun,
    Figure,
    Rows,
    in_turn,
    names,
    parser_for,
    report,
    run,
    say,
    table,
)
from benchmarks.processes import KVOLT, Processes, free_port, metric_total

_BLOCK_SIZE, _KV_BLOCKS, _MAX_SEQS, _MAX_BATCH_TOKENS = 64, 16_384, 256, 8192
_MIGRATION_LIMIT = 3
_SYSTEMS = {
    "kvolt": KVOLT_NAME,
    "dynamo": DYNAMO_NAME,
    "dynamo-migrating": f"{DYNAMO_NAME}, --migration-limit {_MIGRATION_LIMIT}",
}
_PROMPT_WORDS = 200
_EVENT = b"data: "
_LAST_EVENT = b"data: [DONE]"
_WAIT_S = 120.0


class Plan(NamedTuple):
    rounds: int = 5
    streams: int = 100
    tokens: int = 400
    """Tokens of an answer."""
    strike_at: int = 50
    """Events that every client has by then."""


_SMOKE = Plan(1, 4, 100, 5)


class Row(msgspec.Struct, frozen=True):
    """One system in one round."""

    round: int
    system: str
    num_streams: int
    num_whole: int
    """Answers that ended without an error and with all their tokens."""
    num_equal: int | None
    """Whole answers with the text of an undisturbed run; None if answers are random."""
    num_moved: int
    """Migrations, counted by the system."""
    worst_gap_s: float
    errors: dict[str, int]


def main() -> None:
    parser = parser_for(__file__, __doc__, results=None, peer=DYNAMO_NAME)
    parser.add_argument("--systems", type=names, default=tuple(_SYSTEMS), help=f"of {', '.join(_SYSTEMS)}")
    options = parser.parse_args()
    plan = _SMOKE if options.smoke else Plan()
    systems = ("kvolt",) if options.smoke else options.systems
    if unknown := [name for name in systems if name not in _SYSTEMS]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(_SYSTEMS)}")
    dynamo = installed_dynamo(options.peer_dir) if any(name != "kvolt" for name in systems) else None
    rows: list[Row] = []
    for number in range(plan.rounds):
        for name in in_turn(systems, number + 1):
            rows.append(_strike(name, number, plan, dynamo or model_in(options.peer_dir)))
            say(str(rows[-1]))
    report(options, text(rows), {"peer": DYNAMO_NAME, "rows": rows})


def _strike(name: str, number: int, plan: Plan, system: Dynamo | tiny_model.TinyModel) -> Row:
    rng = random.Random(number)
    prompts = [few_words(_PROMPT_WORDS, rng) for _ in range(plan.streams)]
    requests = [chat(prompt, plan.tokens) for prompt in prompts]
    with _served(name, system) as (port, victim):

        def strike() -> None:
            os.killpg(victim.pid, signal.SIGKILL)

        answers = asyncio.run(read_all(port, requests, plan.strike_at, strike))
        num_moved = metric_total(f"http://127.0.0.1:{port}", "kvolt_frontend_model_migration_total")
        undisturbed = asyncio.run(read_all(port, requests)) if name == "kvolt" else None
    num_equal = (
        None
        if undisturbed is None
        else sum(
            answer.is_whole and answer.text == whole.text
            for answer, whole in zip(answers, undisturbed, strict=True)
        )
    )
    return Row(
        round=number,
        system=name,
        num_streams=len(answers),
        num_whole=sum(answer.is_whole and answer.num_tokens == plan.tokens for answer in answers),
        num_equal=num_equal,
        num_moved=int(num_moved),
        worst_gap_s=max(answer.worst_gap_s for answer in answers),
        errors=Counter(each.error or "ended without an error" for each in answers if not each.is_whole),
    )


# --- the systems


@contextmanager
def _served(
    name: str, system: Dynamo | tiny_model.TinyModel
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Port of a frontend, and one of its two workers."""
    with Processes(name) as processes:
        port = free_port()
        if name == "kvolt":
            env = processes.environ()
            processes.start("frontend", [*KVOLT, "frontend", "--port", str(port)], env)
            arguments = {
                **model_arguments(system.model if isinstance(system, Dynamo) else system),
                "preset": "dynamo-mocker",
                "block_size": _BLOCK_SIZE,
                "kv_blocks": _KV_BLOCKS,
                "max_num_seqs": _MAX_SEQS,
                "max_batch_tokens": _MAX_BATCH_TOKENS,
            }
            workers = start_workers(processes, 2, arguments, env)
            processes.wait_workers(port, 2)
        else:
            assert isinstance(system, Dynamo)
            env = dynamo_environ(processes)
            flags = ("--migration-limit", str(_MIGRATION_LIMIT)) if name == "dynamo-migrating" else ()
            start_dynamo_frontend(processes, system, port, env, *flags)
            sizes = mocker_sizes(1, _BLOCK_SIZE, _KV_BLOCKS, _MAX_SEQS, _MAX_BATCH_TOKENS)
            workers = start_mockers(processes, system, env, 2, sizes)
            processes.wait_answer(port, tiny_model.NAME)
            processes.wait_for(lambda: _num_dynamo_workers(port) == 2, "two workers")
        yield port, workers[0]


def _num_dynamo_workers(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as response:
        return int(response.read().count(b'"endpoint":"generate"'))


# --- the clients


class Seen(msgspec.Struct, frozen=True):
    """One answer, as its client saw it."""

    is_whole: bool
    """It ended as answers end, without an error in it."""
    num_tokens: int
    text: str
    worst_gap_s: float
    error: str | None = None


@dataclass(slots=True, eq=False)
class Reading:
    """One answer on its way."""

    request: bytes
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    num_events: int = 0

    async def run(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(self.request)
            while data := await reader.read(1 << 16):
                self.reads.append((time.perf_counter(), data))
                self.num_events += data.count(_EVENT)
        except OSError:
            pass  # what came until then is all there is
        finally:
            writer.close()

    def seen(self) -> Seen:
        events = _events(b"".join(data for _, data in self.reads))
        text, num_tokens, error = [], 0, None
        for event in events:
            body = json.loads(event)
            if "error" in body or "choices" not in body:
                error = str(body)[:200]
                continue
            text += [choice.get("delta", {}).get("content") or "" for choice in body["choices"]]
            num_tokens = (body.get("usage") or {}).get("completion_tokens", num_tokens)
        times = [at for at, data in self.reads if _EVENT in data]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        is_whole = error is None and any(_LAST_EVENT in data for _, data in self.reads)
        return Seen(is_whole, num_tokens, "".join(text), max(gaps, default=0.0), error)


def chat(prompt: str, max_tokens: int) -> bytes:
    """A request for a connection of its own. Reads are kept as they come, and looked at afterwards."""
    usage = {"include_usage": True}
    messages = [{"role": "user", "content": prompt}]
    return chat_request(messages, max_tokens, "Connection: close\r\n", temperature=0.0, stream_options=usage)


async def read_all(
    port: int, requests: Sequence[bytes], strike_at: int = 0, strike: Callable[[], None] | None = None
) -> list[Seen]:
    """All answers at once. When each has so many events, something happens."""
    readings = [Reading(request) for request in requests]
    running = [asyncio.ensure_future(reading.run(port)) for reading in readings]
    try:
        async with asyncio.timeout(_WAIT_S):
            if strike is not None:
                while not all(reading.num_events >= strike_at for reading in readings):
                    if any(task.done() for task in running):
                        raise BrokenRun("an answer ended before anything happened: it is too short")
                    await asyncio.sleep(0.005)
                strike()
            await asyncio.gather(*running)
    except TimeoutError:
        for task in running:
            task.cancel()
    return [reading.seen() for reading in readings]


def _events(raw: bytes) -> list[bytes]:
    """The events of a response but the last; of one that is no stream its whole body."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    body = _joined(rest) if b"chunked" in head.lower() else rest
    if not head.startswith(b"HTTP/1.1 200"):
        return [body] if body.startswith(b"{") else [json.dumps({"error": head.decode()}).encode()]
    events = [line[len(_EVENT) :] for line in body.split(b"\n") if line.startswith(_EVENT)]
    return [event.strip() for event in events if event.strip() != b"[DONE]"]


def _joined(chunks: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while (end := chunks.find(b"\r\n", at)) > 0:
        size = int(chunks[at:end].split(b";")[0], 16)
        if not size:
            break
        parts.append(chunks[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(parts)


# --- the report


def _range(values: Sequence[int | None]) -> str:
    numbers = [value for value in values if value is not None]
    return "..".join(map(str, sorted({min(numbers), max(numbers)}))) if numbers else "-"


_FIGURES = (
    Figure("whole", "num_whole", fold=_range),
    Figure("text equal", "num_equal", fold=_range),
    Figure("moved", "num_moved", fold=_range),
    Figure("worst gap ms", lambda row: row.worst_gap_s * 1e3, ".0f"),
)


def text(rows: Sequence[Row]) -> str:
    about = f"{rows[0].num_streams} streams, SIGKILL to one of two workers"
    body = [(_SYSTEMS[name], *mine.cells(_FIGURES)) for name, mine in Rows(rows).each("system")]
    return f"{about}\n{table(('system', *(each.title for each in _FIGURES)), body)}"


if __name__ == "__main__":
    run(main)
