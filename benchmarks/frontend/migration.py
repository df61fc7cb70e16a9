"""One of two workers is killed under a hundred streams: how many answers end whole, and how long is the pause?

    python -m benchmarks.frontend.migration            both with their defaults, and Dynamo with migration turned on

Run from the repository's root. Each round starts each system anew: a frontend and two processes of one mock worker
each, kvolt's at the speed of Dynamo's mocker (the same step times, blocks of 64 tokens, 16,384 of them). When every
client has some tokens one worker gets SIGKILL. A gap is the time between two reads of a client with events: the worst
one of all streams is reported. kvolt's simulated answers depend on nothing but their prompts, so their texts are
compared with those that the other worker gives afterwards, undisturbed; Dynamo's are random, and only their tokens
are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import msgspec
from benchmarks.frontend import tiny_model
from benchmarks.frontend.edges import (
    DYNAMO_NAME,
    KVOLT_NAME,
    Dynamo,
    dynamo_environ,
    installed_dynamo,
    model_arguments,
    model_in,
    start_dynamo_frontend,
    start_mockers,
    start_workers,
)
from benchmarks.frontend.prompts import few_words
from benchmarks.frontend.struck import Seen, chat, read_all
from benchmarks.harness import in_turn, names, parser_for, report, run, say, spread
from benchmarks.processes import KVOLT, Processes, free_port

_BLOCK_SIZE, _KV_BLOCKS, _MAX_SEQS, _MAX_BATCH_TOKENS = 64, 16_384, 256, 8192
_MIGRATION_LIMIT = 3
_SYSTEMS = ("kvolt", "dynamo", "dynamo-migrating")


class Served(NamedTuple):
    port: int
    victim: subprocess.Popen[bytes]


class Row(msgspec.Struct, frozen=True):
    """One system in one round."""

    round: int
    system: str
    num_streams: int
    num_whole: int
    """Answers that ended without an error and with all their tokens."""
    num_equal: int | None
    """Of these, those whose text is the undisturbed one; None where that is random."""
    num_moved: int
    """As the system counts them."""
    worst_gap_s: float
    errors: dict[str, int]


def main() -> None:
    options = _options()
    rows = _run(options)
    report(options, _table(rows, options.systems), {"peer": DYNAMO_NAME, "rows": rows})


def _options() -> argparse.Namespace:
    parser = parser_for(__file__, __doc__, results=None, peer=DYNAMO_NAME)
    add = parser.add_argument
    add("--streams", type=int, default=100)
    add("--tokens", type=int, default=400, help="tokens of an answer (default %(default)s)")
    add("--prompt-words", type=int, default=200)
    add(
        "--strike-at", type=int, default=50, help="events that every client has by then (default %(default)s)"
    )
    add("--rounds", type=int, default=5)
    add("--systems", type=names, default=_SYSTEMS, help="default: all three")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.streams, options.systems = 1, 4, ("kvolt",)
        options.tokens, options.strike_at = 100, 5
    if unknown := [name for name in options.systems if name not in _SYSTEMS]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(_SYSTEMS)}")
    if not 0 < options.strike_at < options.tokens:
        parser.error("the strike must come before the end of the answers")
    return options


def _run(options: argparse.Namespace) -> list[Row]:
    model = model_in(options.peer_dir)
    dynamo = installed_dynamo(options.peer_dir) if any(name != "kvolt" for name in options.systems) else None
    rows: list[Row] = []
    for number in range(options.rounds):
        for name in in_turn(options.systems, number + 1):
            served = _kvolt(model) if name == "kvolt" else _dynamo(dynamo, name == "dynamo-migrating")
            rows.append(_strike(name, number, served, options))
            say(str(rows[-1]))
    return rows


def _strike(
    name: str, number: int, serve: AbstractContextManager[Served], options: argparse.Namespace
) -> Row:
    rng = random.Random(number)
    prompts = [few_words(options.prompt_words, rng) for _ in range(options.streams)]
    requests = [chat(prompt, options.tokens) for prompt in prompts]
    with serve as (port, victim):

        def strike() -> None:
            os.killpg(victim.pid, signal.SIGKILL)

        answers = asyncio.run(read_all(port, requests, options.strike_at, strike))
        num_moved = int(_metric(port, "kvolt_frontend_model_migration_total"))
        undisturbed = asyncio.run(read_all(port, requests)) if name == "kvolt" else None
    whole = [answer.is_whole and answer.num_tokens == options.tokens for answer in answers]
    errors: dict[str, int] = {}
    for answer in answers:
        if not answer.is_whole:
            error = answer.error or "ended without an error"
            errors[error] = errors.get(error, 0) + 1
    return Row(
        number,
        name,
        len(answers),
        sum(whole),
        None if undisturbed is None else _num_equal(answers, undisturbed),
        num_moved,
        max(answer.worst_gap_s for answer in answers),
        errors,
    )


def _num_equal(answers: Sequence[Seen], undisturbed: Sequence[Seen]) -> int:
    return sum(
        answer.is_whole and answer.text == whole.text
        for answer, whole in zip(answers, undisturbed, strict=True)
    )


# --- the systems


@contextmanager
def _kvolt(model: tiny_model.TinyModel) -> Iterator[Served]:
    with Processes("kvolt") as processes:
        env, port = processes.environ(), free_port()
        processes.start("frontend", [*KVOLT, "frontend", "--port", str(port)], env)
        arguments = {
            **model_arguments(model),
            "preset": "dynamo-mocker",
            "block_size": _BLOCK_SIZE,
            "kv_blocks": _KV_BLOCKS,
            "max_num_seqs": _MAX_SEQS,
            "max_batch_tokens": _MAX_BATCH_TOKENS,
        }
        workers = start_workers(processes, 2, arguments, env)
        processes.wait_workers(port, 2)
        yield Served(port, workers[0])


@contextmanager
def _dynamo(dynamo: Dynamo | None, is_migrating: bool) -> Iterator[Served]:
    assert dynamo is not None
    with Processes("dynamo") as processes:
        env, port = dynamo_environ(processes), free_port()
        flags = ("--migration-limit", str(_MIGRATION_LIMIT)) if is_migrating else ()
        start_dynamo_frontend(processes, dynamo, port, env, *flags)
        sizes = (_BLOCK_SIZE, _KV_BLOCKS, _MAX_SEQS, _MAX_BATCH_TOKENS)
        workers = start_mockers(processes, dynamo, env, 2, 1, *sizes)
        processes.wait_answer(port, tiny_model.NAME)
        processes.wait_for(lambda: _get(port, "/health").count('"endpoint":"generate"') == 2, "two workers")
        yield Served(port, workers[0])


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return str(response.read().decode())


def _metric(port: int, name: str) -> float:
    """All series of it together."""
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", _get(port, "/metrics"), re.MULTILINE)
    return sum(map(float, found))


_NAMES = {
    "kvolt": KVOLT_NAME,
    "dynamo": DYNAMO_NAME,
    "dynamo-migrating": f"{DYNAMO_NAME}, --migration-limit {_MIGRATION_LIMIT}",
}


def _table(rows: Sequence[Row], systems: Sequence[str]) -> str:
    lines = [f"{'':36} {'whole':>12} {'text equal':>12} {'moved':>12} {'worst gap ms':>24}"]
    for system in systems:
        mine = [row for row in rows if row.system == system]
        equal = [row.num_equal for row in mine if row.num_equal is not None]
        gap = spread([row.worst_gap_s * 1e3 for row in mine]).text(".0f")
        lines.append(
            f"{_NAMES[system]:36} {_range([row.num_whole for row in mine]):>12} {_range(equal):>12} "
            f"{_range([row.num_moved for row in mine]):>12} {gap:>24}"
        )
    return "\n".join([f"{rows[0].num_streams} streams, SIGKILL to one of two workers", *lines])


def _range(numbers: Sequence[int]) -> str:
    if not numbers:
        return "-"
    lowest, highest = min(numbers), max(numbers)
    return str(lowest) if lowest == highest else f"{lowest}..{highest}"


if __name__ == "__main__":
    run(main)
