"""What the tokenization cache gives in chats: CPU per request with it and without, kvolt's beside Dynamo's.

Run from the repository's root: `python -m benchmarks.frontend.chats`. Every conversation has a user's
message of 150 words and an answer of 40 in each turn, text both, and each request carries all of it so
far, as chat clients do; one token is asked for. Conversations run side by side, are others in every round,
and the same for all systems. The number of prompt tokens, which each system reports, must be the
same everywhere. Hit share is that of prompt tokens that came from the cache, by the system's own metrics.

Four systems are up at the same time and loaded in turn: both edges with their caches as they come, kvolt with
a cache too small for a single message, Dynamo with DYN_TOKENIZER_CACHE=0.
"""

from __future__ import annotations

import argparse
import random
import re
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

import msgspec
import uvloop
from benchmarks.frontend.client import Measured, closed_load
from benchmarks.frontend.edge import ROUTERS
from benchmarks.frontend.edges import (
    DYNAMO_NAME,
    KVOLT_NAME,
    NUM_WORKERS,
    Edge,
    installed_dynamo,
    model_in,
    serve_dynamo,
    serve_kvolt,
)
from benchmarks.frontend.prompts import chat_request, passage
from benchmarks.harness import BrokenRun, Missing, in_turn, parser_for, report, run, say, spread, table

_SMALL_CACHE_BYTES = 1024
_USER_WORDS, _ANSWER_WORDS = 150, 40

_OFF = " without cache"


class ChatRow(msgspec.Struct, frozen=True):
    """One system in one round."""

    round: int
    system: str
    requests: int
    cpu_us_per_request: float
    requests_per_s: float
    prompt_tokens: int
    """Of all requests together."""
    cached_tokens: int
    """Of these, as the system counts them."""
    rss_bytes: int


def main() -> None:
    options = _options()
    rows = _run(options)
    report(options, _table(rows, options), {"peer": DYNAMO_NAME, "rows": rows})


def _options() -> argparse.Namespace:
    parser = parser_for(__file__, __doc__, results=None, peer=DYNAMO_NAME)
    add = parser.add_argument
    add("--turns", type=int, default=12, help="turns of a conversation (default %(default)s)")
    add("--conversations", type=int, default=64, help="concurrent, in a round (default %(default)s)")
    add("--rounds", type=int, default=5, help="rounds of all systems (default %(default)s)")
    add("--router", choices=list(ROUTERS), default=next(iter(ROUTERS)), help="of both (default %(default)s)")
    options = parser.parse_args()
    if options.smoke:
        options.turns, options.conversations, options.rounds = 2, 4, 1
    if min(options.turns, options.conversations, options.rounds) < 1:
        parser.error("turns, conversations and rounds must be positive")
    return options


def _run(options: argparse.Namespace) -> list[ChatRow]:
    rows: list[ChatRow] = []
    with ExitStack() as stack:
        edges = [stack.enter_context(edge) for edge in _edges(options)]
        for edge in edges:
            _load(edge, _conversations(8, 2, seed=0))
        for number in range(1, options.rounds + 1):
            conversations = _conversations(options.conversations, options.turns, seed=number)
            for edge in in_turn(edges, number):
                row = _row(number, edge, conversations)
                rows.append(row)
                say(f"round {number}  {row.system:<27} {row.cpu_us_per_request:>7.0f} us/request")
            counts = {row.prompt_tokens for row in rows if row.round == number}
            if len(counts) != 1:
                raise BrokenRun(f"the systems disagree on the number of prompt tokens: {sorted(counts)}")
    return rows


def _edges(options: argparse.Namespace) -> list[AbstractContextManager[Edge]]:
    model, (ours, mode) = model_in(options.peer_dir), ROUTERS[options.router]
    arguments, num_workers = ("--router", ours), 1 if options.smoke else NUM_WORKERS
    small = {"KVOLT_FRONTEND_TOKEN_CACHE_BYTES": str(_SMALL_CACHE_BYTES)}
    edges = [
        serve_kvolt(model, name=name, frontend_arguments=arguments, num_workers=num_workers, **environ)
        for name, environ in ((KVOLT_NAME, {}), (KVOLT_NAME + _OFF, small))
    ]
    try:
        dynamo = installed_dynamo(options.peer_dir, may_install=not options.smoke)
    except Missing:
        if not options.smoke:
            raise
        return edges
    edges.insert(1, serve_dynamo(dynamo, router_mode=mode))
    off = serve_dynamo(dynamo, name=DYNAMO_NAME + _OFF, router_mode=mode, DYN_TOKENIZER_CACHE="0")
    return [*edges, off]


def _conversations(count: int, turns: int, seed: int) -> list[list[bytes]]:
    """The requests of each, one per turn."""
    rng = random.Random(seed)
    return [_conversation(turns, rng) for _ in range(count)]


def _conversation(turns: int, rng: random.Random) -> list[bytes]:
    messages: list[dict[str, str]] = []
    requests = []
    for _ in range(turns):
        messages.append({"role": "user", "content": passage(_USER_WORDS, rng)})
        requests.append(chat_request(messages, 1))
        messages.append({"role": "assistant", "content": passage(_ANSWER_WORDS, rng)})
    return requests


def _load(edge: Edge, conversations: Sequence[Sequence[bytes]]) -> Measured:
    return uvloop.run(closed_load(edge, conversations))


def _row(number: int, edge: Edge, conversations: Sequence[Sequence[bytes]]) -> ChatRow:
    before = _counters(edge)
    done = _load(edge, conversations)
    after = _counters(edge)
    cached, prompt = (after[name] - before[name] for name in ("cached", "prompt"))
    return ChatRow(
        round=number,
        system=edge.name,
        requests=done.responses,
        cpu_us_per_request=1e6 * done.edge_cpu_s / done.responses,
        requests_per_s=done.responses / done.wall_s,
        prompt_tokens=int(prompt),
        cached_tokens=int(cached),
        rss_bytes=edge.meter.rss_bytes(),
    )


def _counters(edge: Edge) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{edge.port}/metrics", timeout=30) as response:
        text = response.read().decode()

    def total(name: str) -> float:
        found = re.findall(rf"^kvolt_frontend_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    return {
        "cached": total("tokenizer_cache_cached_tokens_total"),
        "prompt": total("input_sequence_tokens_sum"),
    }


def _table(rows: Sequence[ChatRow], options: argparse.Namespace) -> str:
    systems = list(dict.fromkeys(row.system for row in rows if row.round == 1))
    first_system = DYNAMO_NAME if DYNAMO_NAME in systems else KVOLT_NAME
    base = {row.round: row.cpu_us_per_request for row in rows if row.system == first_system}
    body = []
    for system in systems:
        mine = [row for row in rows if row.system == system]
        body.append(
            (
                system,
                spread([row.cpu_us_per_request for row in mine]).text(",.0f"),
                spread([row.cpu_us_per_request / base[row.round] for row in mine]).text(),
                spread([row.requests_per_s for row in mine]).text(",.0f"),
                f"{100 * sum(row.cached_tokens for row in mine) / sum(row.prompt_tokens for row in mine):.1f} %",
                f"{max(row.rss_bytes for row in mine) / (1 << 20):.0f}",
            )
        )
    first = rows[0]
    about = (
        f"{options.conversations} conversations of {options.turns} turns, {options.rounds} rounds; "
        f"{first.prompt_tokens / first.requests:,.0f} prompt tokens per request"
    )
    head = ("system", "CPU us per request", f"/ {first_system}", "requests/s", "tokens from cache", "RSS MiB")
    return "\n".join([about, table(head, body)])


if __name__ == "__main__":
    run(main)
