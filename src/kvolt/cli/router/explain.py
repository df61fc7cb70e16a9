"""`kvolt router explain`: where a prompt would go in a running cluster, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvolt.cli.cluster import visit
from kvolt.cli.process import run_loop
from kvolt.cli.trace.record import find_frontends
from kvolt.core.errors import ConfigError, KvoltError
from kvolt.frontend.admin.explain import FRONTEND_EXPLAIN_ENDPOINT, ExplainRoute
from kvolt.router.explanation import Candidate, Explanation
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.plane.port import Destination

HELP = """
Shows for a prompt every worker that could take it, each term of what it would cost there, which one would get it,
and why others could not. Nothing is sent and nothing is booked: ask as often as you like, under load too.

  kvolt router explain "Once upon a time"            a plain prompt
  kvolt router explain --chat request.json           a body of /v1/chat/completions (or of /v1/completions)
  kvolt router explain --tokens 1,2,3                token ids; --tokens @FILE reads them
  kvolt router explain - < prompt.txt
  kvolt router explain "..." --json                  all of it, for programs

What the columns mean (docs/router.md says how they are worked out):
  overlap    blocks of the prompt, from its first on, that the worker has; (+n) are not on its device yet: on their
             way there, in a tier below it, or in the pool that it reaches
  queue      until it has computed the prompts that it was sent before
  prefill    what this prompt takes there, less what it has
  slowdown   by how much longer the steps of those get that decode there
  pace       how many times as long as it says it takes, as far as was seen
  fails      share of its recent requests that failed; the cost includes the retry
  cost       what the policy makes of it: seconds with latency, blocks with classic; the least wins
"""

SECTIONS = ("discovery", "plane", "log")

_USUAL = "events, exact"
_WIDTH = 140
"""Where nobody looks on: a file has no edge."""
_LIMITS = Deadlines(connect_s=5.0, first_s=15.0, between_s=15.0, total_s=20.0)
_decode = msgspec.msgpack.Decoder(Explanation).decode


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="text of the prompt; - reads it from stdin")
    parser.add_argument("--chat", metavar="FILE", help="a request body as JSON, with `messages` or `prompt`")
    parser.add_argument("--tokens", metavar="IDS", help="token ids with commas between, or @FILE")
    parser.add_argument("--model", help="which model, or which adapter; may be left out where there is one")
    parser.add_argument("--url", help="ask the frontend that listens there; else the first that is found")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    question = ExplainRoute(body_of(args))

    async def ask() -> int:
        async with visit(loaded.settings) as cluster:
            frontend = (await find_frontends(cluster, loaded.settings, args.url))[0]
            to = Destination(frontend.address, FRONTEND_EXPLAIN_ENDPOINT)
            async with await cluster.open(to, question, _LIMITS, _decode) as stream:
                told: Explanation | None = await anext(stream, None)
        if told is None:
            raise KvoltError(f"{frontend.process} ended without an answer")
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
        else:
            show(told, Console(width=None if sys.stdout.isatty() else _WIDTH))
        return 0 if told.candidates else 1

    return run_loop(ask)


# --- the question


def body_of(args: argparse.Namespace) -> bytes:
    """What a frontend is asked; ConfigError for none, or several at once."""
    given = [each for each in (args.prompt, args.chat, args.tokens) if each is not None]
    if len(given) != 1:
        raise ConfigError(
            "one prompt is needed" if not given else "one prompt at a time",
            key="prompt",
            remedy='write `kvolt router explain "TEXT"`, --chat FILE or --tokens IDS',
        )
    if args.chat is not None:
        body = _json_object(_read(args.chat), args.chat)
    elif args.tokens is not None:
        text = _read(args.tokens[1:]).decode() if args.tokens.startswith("@") else args.tokens
        body = {"prompt": _token_ids(text)}
    else:
        body = {"prompt": sys.stdin.read() if args.prompt == "-" else args.prompt}
    if args.model is not None:
        body["model"] = args.model
    return msgspec.json.encode(body)


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}", key="prompt") from error


def _json_object(text: bytes, name: str) -> dict[str, Any]:
    try:
        body: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{name} is no JSON object: {error}",
            key="chat",
            remedy='it is to hold a request, as {"messages": [...]}',
        ) from error
    return body


def _token_ids(text: str) -> list[int]:
    try:
        return [int(each) for each in text.replace(",", " ").replace("[", " ").replace("]", " ").split()]
    except ValueError as error:
        raise ConfigError(
            f"these are no token ids: {error}", key="tokens", remedy="as --tokens 1,2,3"
        ) from error


# --- the answer


def show(told: Explanation, console: Console) -> None:
    console.print(
        f"{told.prompt_tokens} prompt tokens, {told.num_blocks} whole blocks of {told.block_size}; about "
        f"{told.output_tokens:.0f} tokens of answer expected. "
        f"Policy [bold]{told.policy or 'unnamed'}[/bold], decided by {told.decided_by}.",
        highlight=False,
    )
    if told.candidates:
        console.print(_table(told))
    for line in reasons(told):
        console.print(Text(line))
    for how, names in _by_source(told.candidates).items():
        if how != _USUAL:
            console.print(Text(f"{names}: what is held is known by {how}."))
    if told.left_out:
        console.print(Text("\nLeft out:"))
        for each in told.left_out:
            console.print(Text(f"  {each.process} ({each.instance}): {each.why}"))


def _by_source(candidates: Sequence[Candidate]) -> dict[str, str]:
    """How it is known what workers hold, with the workers."""
    names: dict[str, dict[str, None]] = {}
    for each in candidates:
        names.setdefault(each.held_by, {})[each.process] = None
    return {how: ", ".join(workers) for how, workers in names.items()}


def _table(told: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("  worker", no_wrap=True)
    for name in ("overlap", "queue", "prefill", "slowdown", "decoding", "blocks", "pace", "fails", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in told.candidates:
        table.add_row(*_row(each), style="bold" if each.terms.is_chosen else None)
    return table


def _row(candidate: Candidate) -> tuple[str, ...]:
    terms = candidate.terms
    coming = terms.overlap_blocks - terms.held_blocks
    room = f"/{terms.total_blocks:.0f}" if terms.total_blocks else ""
    rank = f" rank {terms.dp_rank}" if terms.dp_rank else ""
    return (
        f"{'→' if terms.is_chosen else ' '} {candidate.process}{rank}{' (full)' if terms.is_saturated else ''}",
        f"{terms.overlap_blocks:.0f}" + (f" (+{coming:.0f})" if coming else ""),
        _ms(terms.queue_s),
        _ms(terms.prefill_s),
        _ms(terms.slowdown_s),
        f"{terms.decoding:.0f}",
        f"{terms.blocks:.0f}{room}",
        f"{terms.pace:.2f}",
        f"{terms.failure_rate:.0%}" if terms.failure_rate else "",
        f"{terms.cost:.4g}",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def reasons(told: Explanation) -> list[str]:
    """Why it would go there, in words."""
    if not told.candidates:
        return [f"Nobody could take it: {told.problem}."]
    chosen = next(each for each in told.candidates if each.terms.is_chosen)
    cheaper = [each for each in told.candidates if each.terms.cost < chosen.terms.cost]
    lines = []
    if all(each.terms.is_saturated for each in told.candidates):
        waiting = f" behind {told.num_waiting} others" if told.num_waiting else ""
        lines.append(
            f"Every worker has enough to do: it would wait in the router{waiting}, where it is decided late."
        )
    elif len(told.candidates) == 1:
        lines.append(f"{chosen.process} is the only one that could take it.")
    elif any(each.terms.is_saturated for each in cheaper):
        lines.append(f"{chosen.process} costs least of those that have not enough to do already.")
    elif cheaper:
        lines.append(
            f"{chosen.process} was drawn: at this temperature others than the least costly get some, too."
        )
    else:
        others = [each for each in told.candidates if each is not chosen]
        least = min(each.terms.cost for each in others)
        ties = sum(each.terms.cost == chosen.terms.cost for each in others)
        if ties:
            lines.append(f"{ties + 1} workers cost the same: {chosen.process} was drawn from them.")
        else:
            lines.append(f"{chosen.process} costs least: {chosen.terms.cost:.4g}, the next one {least:.4g}.")
    best = max(each.terms.overlap_blocks for each in told.candidates)
    if best > chosen.terms.overlap_blocks:
        lines.append(
            f"Another holds {best:.0f} blocks of the prompt, {best - chosen.terms.overlap_blocks:.0f} more: "
            "to wait for it, or to crowd it, is dearer than to compute them again."
        )
    if chosen.terms.affinity:
        lines.append("Its session was served there last, which counts for it.")
    return lines
