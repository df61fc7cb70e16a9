"""One of two workers is killed under a hundred streams: how many answers end whole, and how long is the pause?

    python -m benchmarks.frontend.migration            both with their defaults, and Dynamo with migration turned on
    python -m benchmarks.frontend.migration --quick    one round of twenty streams: for a look, not for a claim

Run from the repository's root. Each round starts each system anew: a frontend and two processes of one mock worker
each, kvolt's at the speed of Dynamo's mocker (the same step times, blocks of 64 tokens, 16,384 of them). When every
client has some tokens one worker gets SIGKILL. A gap is between two reads of a client that brought events: the worst
one of all streams is told. kvolt's simulated answers depend on nothing but their prompts, so their texts are compared
with those that the other worker gives afterwards, undisturbed; Dynamo's are random, and only their tokens are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from benchmarks.frontend import kvolt_side, peer, tiny_model
from benchmarks.frontend.prompts import few_words
from benchmarks.frontend.struck import Seen, chat, read_all
from benchmarks.frontend.system import Processes, clean_environ, free_port
from benchmarks.runtime.pair import BrokenRun
from benchmarks.runtime.report import machine, spread

_ROOT = Path(__file__).resolve().parents[2]
_BLOCK_SIZE, _KV_BLOCKS, _MAX_SEQS, _MAX_BATCH_TOKENS = 64, 16_384, 256, 8192
_MIGRATION_LIMIT = 3
_READY_S = 60.0
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the processes we started end too
    try:
        rows = _run(options)
    except BrokenRun as error:
        sys.exit(f"no figures: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(_table(rows, options.systems))
    if options.out is not None:
        command = shlex.join(["python", "-m", "benchmarks.frontend.migration", *sys.argv[1:]])
        found = {"command": command, "machine": machine(), "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontend.migration", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--streams", type=int, default=100)
    add("--tokens", type=int, default=400, help="of each answer (default %(default)s)")
    add("--prompt-words", type=int, default=200)
    add(
        "--strike-at", type=int, default=50, help="events that every client has by then (default %(default)s)"
    )
    add("--rounds", type=int, default=5)
    add("--quick", action="store_true", help="one round of twenty streams")
    add("--systems", type=lambda text: tuple(text.split(",")), default=_SYSTEMS, help="default: all three")
    add("--peer-dir", type=Path, default=peer.default_folder(), help="where Dynamo is or will be installed")
    add("--out", type=Path, help="write all figures as JSON to this file")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.streams = 1, 20
    if unknown := [name for name in options.systems if name not in _SYSTEMS]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(_SYSTEMS)}")
    if not 0 < options.strike_at < options.tokens:
        parser.error("the strike must come before the end of the answers")
    return options


def _run(options: argparse.Namespace) -> list[Row]:
    model = peer.model_beside(options.peer_dir)
    dynamo = peer.installed(options.peer_dir) if any(name != "kvolt" for name in options.systems) else None
    rows: list[Row] = []
    for number in range(options.rounds):
        order = options.systems if number % 2 == 0 else options.systems[::-1]
        for name in order:
            served = _kvolt(model) if name == "kvolt" else _dynamo(dynamo, name == "dynamo-migrating")
            rows.append(_strike(name, number, served, options))
            print(rows[-1], file=sys.stderr)
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
        num_moved = int(_metric(port, "dynamo_frontend_model_migration_total"))
        undisturbed = asyncio.run(read_all(port, requests)) if name == "kvolt" else None
    whole = [answer.is_whole and answer.num_tokens == options.tokens for answer in answers]
    errors: dict[str, int] = {}
    for answer in answers:
        if not answer.is_whole:
            told = answer.error or "it ended without a word"
            errors[told] = errors.get(told, 0) + 1
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
        env = clean_environ(
            KVOLT_DISCOVERY_PATH=str(processes.folder / "discovery"),
            KVOLT_LOG_LEVEL="warning",
            PYTHONPATH=str(_ROOT),
        )
        port = free_port()
        kvolt = [sys.executable, "-m", "kvolt"]
        processes.start("frontend", [*kvolt, "frontend", "--port", str(port)], env)
        arguments = {
            "model_tokenizer": str(model.tokenizer_path),
            "eos_token": tiny_model.EOS_TOKEN,
            "chat_template": model.chat_template,
            "preset": "dynamo-mocker",
            "block_size": _BLOCK_SIZE,
            "kv_blocks": _KV_BLOCKS,
            "max_num_seqs": _MAX_SEQS,
            "max_batch_tokens": _MAX_BATCH_TOKENS,
        }
        given = [part for key, value in arguments.items() for part in ("--arg", f"{key}={value}")]
        worker = [*kvolt, "worker", tiny_model.NAME, "--engine", "sim", *given]
        workers = [processes.start(f"worker-{number}", worker, env) for number in range(2)]
        processes.wait_ready(port)
        _wait(lambda: _metric(port, "dynamo_frontend_model_workers") == 2)
        yield Served(port, workers[0])


@contextmanager
def _dynamo(dynamo: peer.Peer | None, is_migrating: bool) -> Iterator[Served]:
    assert dynamo is not None
    with Processes("dynamo") as processes:
        env = clean_environ(
            DYN_FILE_KV=str(processes.folder / "discovery"), DYN_LOG="warn", HF_HUB_OFFLINE="1"
        )
        port = free_port()
        command = [str(dynamo.python), "-m", "dynamo.frontend", *peer.PLANES]
        command += ["--http-host", "127.0.0.1", "--http-port", str(port)]
        if is_migrating:
            command += ["--migration-limit", str(_MIGRATION_LIMIT)]
        processes.start("frontend", command, env)
        mocker = [
            *(str(dynamo.python), "-m", "dynamo.mocker", *peer.PLANES),
            *("--model-path", str(dynamo.model.path), "--model-name", tiny_model.NAME),
            *("--num-workers", "1", "--block-size", str(_BLOCK_SIZE)),
            *("--num-gpu-blocks-override", str(_KV_BLOCKS)),
            *("--max-num-seqs", str(_MAX_SEQS), "--max-num-batched-tokens", str(_MAX_BATCH_TOKENS)),
        ]
        workers = [processes.start(f"worker-{number}", mocker, env) for number in range(2)]
        processes.wait_ready(port)
        _wait(lambda: _get(port, "/health").count('"endpoint":"generate"') == 2)
        yield Served(port, workers[0])


def _wait(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _READY_S
    while not is_there():
        if time.monotonic() > deadline:
            raise BrokenRun(f"the frontend does not know of two workers within {_READY_S:.0f} s")
        time.sleep(0.2)


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return str(response.read().decode())


def _metric(port: int, name: str) -> float:
    """All series of it together."""
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", _get(port, "/metrics"), re.MULTILINE)
    return sum(map(float, found))


# --- what was found

_NAMES = {
    "kvolt": kvolt_side.NAME,
    "dynamo": peer.NAME,
    "dynamo-migrating": f"{peer.NAME}, --migration-limit {_MIGRATION_LIMIT}",
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
    main()
