"""One of two workers is killed during a hundred streams: number of complete answers, and length of the pause.

    python -m benchmarks.frontend.migration            both with their defaults, and Dynamo with migration turned on

Run from the repository's root. Each round restarts each system: a frontend and two processes of one mock worker
each, kvolt's at the speed of Dynamo's mocker (the same step times, blocks of 64 tokens, 16,384 of them). When every
client has some tokens one worker gets SIGKILL. A gap is the time between two events of a stream: the worst one of all
streams is reported. kvolt's simulated answers depend on nothing but their prompts, so their texts are compared with
those that the other worker gives afterwards, undisturbed; Dynamo's are random, and only their tokens are counted.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from benchmarks.frontend.prompts import chat_body, few_words
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

from kvolt.bench.load.exchange import Exchange, RequestPlan
from kvolt.bench.load.sample import Sample
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.client_call import Timeouts
from kvolt.runtime.http.server_url import ServerUrl

_BLOCK_SIZE, _KV_BLOCKS, _MAX_SEQS, _MAX_BATCH_TOKENS = 64, 16_384, 256, 8192
_MIGRATION_LIMIT = 3
_SYSTEMS = {
    "kvolt": KVOLT_NAME,
    "dynamo": DYNAMO_NAME,
    "dynamo-migrating": f"{DYNAMO_NAME}, --migration-limit {_MIGRATION_LIMIT}",
}
_PROMPT_WORDS = 200
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
    bodies = [chat(prompt, plan.tokens) for prompt in prompts]
    with _served(name, system) as (port, victim):

        def strike() -> None:
            os.killpg(victim.pid, signal.SIGKILL)

        answers = asyncio.run(read_all(port, bodies, plan.strike_at, strike))
        num_moved = metric_total(
            f"http://127.0.0.1:{port}", "(?:kvolt|dynamo)_frontend_model_migration_total"
        )
        undisturbed = asyncio.run(read_all(port, bodies)) if name == "kvolt" else None
    whole = [each.sample.error is None and each.sample.output_tokens == plan.tokens for each in answers]
    num_equal = None
    if undisturbed is not None:
        pairs = zip(answers, undisturbed, strict=True)
        num_equal = sum(one.sample.error is None and one.text == other.text for one, other in pairs)
    return Row(
        round=number,
        system=name,
        num_streams=len(answers),
        num_whole=sum(whole),
        num_equal=num_equal,
        num_moved=int(num_moved),
        worst_gap_s=max(each.sample.max_gap_s for each in answers),
        errors=Counter(
            f"{each.sample.error}: {each.sample.message}" for each in answers if each.sample.error
        ),
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


class Answer(msgspec.Struct, frozen=True):
    """One answer, as its client saw it."""

    sample: Sample
    text: str


def chat(prompt: str, max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    return chat_body(messages, max_tokens, temperature=0.0, stream_options={"include_usage": True})


async def read_all(
    port: int, bodies: Sequence[bytes], strike_at: int = 0, strike: Callable[[], None] | None = None
) -> list[Answer]:
    """All answers at once. When each has so many events, `strike` is called."""
    answers: dict[int, Answer] = {}
    has_ended = asyncio.Event()

    def on_end(exchange: Exchange, sample: Sample) -> None:
        answers[sample.number] = Answer(sample, exchange.answer.text)
        if len(answers) == len(bodies):
            has_ended.set()

    loop = asyncio.get_running_loop()
    async with HttpClient(ServerUrl.parse(f"127.0.0.1:{port}"), max_connections=len(bodies)) as client:
        exchanges = []
        for number, body in enumerate(bodies):
            plan = RequestPlan(
                number=number,
                session=number,
                turn=0,
                due_s=0.0,
                started_s=0.0,
                input_tokens=0,
                keep_text=True,
            )
            exchanges.append(Exchange(plan, loop.time(), loop.time, lambda gap_s, times: None, on_end))
            timeouts = Timeouts(_WAIT_S, _WAIT_S)
            exchanges[-1].call = client.send("/v1/chat/completions", body, exchanges[-1], timeouts)
        async with asyncio.timeout(2 * _WAIT_S):
            if strike is not None:
                while not all(each.answer.num_events >= strike_at for each in exchanges):
                    if answers:
                        raise BrokenRun("an answer ended before anything happened: it is too short")
                    await asyncio.sleep(0.005)
                strike()
            await has_ended.wait()
    return [answers[number] for number in range(len(bodies))]


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
