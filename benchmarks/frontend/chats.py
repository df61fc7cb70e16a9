"""Effect of the tokenization cache in chats: CPU time per request with and without it, for kvolt and Dynamo.

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
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

import msgspec
import uvloop
from benchmarks.frontend.client import closed_load
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
from benchmarks.harness import (
    BrokenRun,
    Figure,
    Rows,
    in_turn,
    parser_for,
    peer_unless_smoke,
    report,
    run,
    say,
    table,
)
from benchmarks.processes import metric_total

_CONVERSATIONS, _TURNS, _ROUNDS = 64, 12, 5
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
    """Prompt tokens of all requests."""
    cached_tokens: int
    """Prompt tokens found in the cache, as counted by the system."""
    rss_bytes: int


def main() -> None:
    options = parser_for(__file__, __doc__, results=None, peer=DYNAMO_NAME).parse_args()
    num_conversations, turns, num_rounds = (4, 2, 1) if options.smoke else (_CONVERSATIONS, _TURNS, _ROUNDS)
    rows: list[ChatRow] = []
    with ExitStack() as stack:
        edges = [stack.enter_context(edge) for edge in _edges(options)]
        for edge in edges:
            uvloop.run(closed_load(edge, _conversations(8, 2, seed=0)))
        for number in range(1, num_rounds + 1):
            conversations = _conversations(num_conversations, turns, seed=number)
            for edge in in_turn(edges, number):
                rows.append(_row(number, edge, conversations))
                say(f"round {number}  {edge.name:<27} {rows[-1].cpu_us_per_request:>7.0f} us/request")
            counts = {row.prompt_tokens for row in rows if row.round == number}
            if len(counts) != 1:
                raise BrokenRun(f"the systems disagree on the number of prompt tokens: {sorted(counts)}")
    about = f"{num_conversations} conversations of {turns} turns, {num_rounds} rounds"
    report(options, f"{about}; {text(rows)}", {"peer": DYNAMO_NAME, "rows": rows})


def _edges(options: argparse.Namespace) -> Sequence[AbstractContextManager[Edge]]:
    model, num_workers = model_in(options.peer_dir), 1 if options.smoke else NUM_WORKERS
    small = {"KVOLT_FRONTEND_TOKEN_CACHE_BYTES": str(_SMALL_CACHE_BYTES)}
    edges = [
        serve_kvolt(model, name=name, num_workers=num_workers, **environ)
        for name, environ in ((KVOLT_NAME, {}), (KVOLT_NAME + _OFF, small))
    ]
    dynamo = peer_unless_smoke(options, installed_dynamo)
    if dynamo is not None:
        edges.insert(1, serve_dynamo(dynamo))
        edges.append(serve_dynamo(dynamo, name=DYNAMO_NAME + _OFF, DYN_TOKENIZER_CACHE="0"))
    return edges


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


def _row(number: int, edge: Edge, conversations: Sequence[Sequence[bytes]]) -> ChatRow:
    before = _counters(edge)
    done = uvloop.run(closed_load(edge, conversations))
    prompt, cached = (after - start for after, start in zip(_counters(edge), before, strict=True))
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


def _counters(edge: Edge) -> list[float]:
    names = ("input_sequence_tokens_sum", "tokenizer_cache_cached_tokens_total")
    return [
        metric_total(f"http://127.0.0.1:{edge.port}", f"(?:kvolt|dynamo)_frontend_{name}") for name in names
    ]


_CPU = Figure("CPU us per request", "cpu_us_per_request", ",.0f")
_MORE = (
    Figure("requests/s", "requests_per_s", ",.0f"),
    Figure("tokens from cache %", lambda row: 100 * row.cached_tokens / row.prompt_tokens, ".1f"),
    Figure("RSS MiB", lambda row: row.rss_bytes / (1 << 20), ".0f", max),
)


def text(rows: Sequence[ChatRow]) -> str:
    whole = Rows(rows)
    first = whole.where(system=DYNAMO_NAME) or whole.where(system=KVOLT_NAME)
    body = [
        (system, *mine.cells([_CPU]), mine.over(first, _CPU), *mine.cells(_MORE))
        for system, mine in whole.each("system")
    ]
    head = ("system", _CPU.title, f"/ {first.rows[0].system}", *(each.title for each in _MORE))
    return f"{rows[0].prompt_tokens / rows[0].requests:,.0f} prompt tokens per request\n{table(head, body)}"


if __name__ == "__main__":
    run(main)
