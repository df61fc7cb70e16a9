"""`kvolt router explain`: show how a running cluster would route a prompt."""

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

from kvolt.api.cluster import visit
from kvolt.cli.chat.stream import error_message, read_json
from kvolt.cli.flags import CLIENT_GROUPS, option, switch
from kvolt.cli.frontends import find_frontends
from kvolt.cli.process import run_loop
from kvolt.core.errors import ConfigError, KvoltError, Unavailable
from kvolt.frontend.admin.explain import FRONTEND_EXPLAIN_ENDPOINT, ExplainRoute
from kvolt.router.explanation import Candidate, Explanation, PrefillExplanation
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.server_url import ServerUrl
from kvolt.runtime.plane.port import Destination

HELP = """
Show how a running cluster would route a prompt: the cost terms of each candidate worker, the chosen worker, the prefill
mode, and why other workers are excluded. Sends no request and reserves nothing.

Examples:
  kvolt router explain "Once upon a time"            a plain prompt
  kvolt router explain --chat request.json           a request body of /v1/chat/completions or /v1/completions
  kvolt router explain --tokens 1,2,3                token ids; --tokens @FILE reads them from a file
  kvolt router explain - < prompt.txt
  kvolt router explain "..." --json                  all details as JSON

Columns (docs/cost-model.md defines them):
  overlap    prefix blocks of the prompt that the worker holds; (+n) in lower tiers, in its pool or in transfer
  decoding   requests that decode there
  blocks     blocks of its requests in flight
  pace       measured step times relative to its published latency model
  fails      fraction of its recent requests that failed
  queue ...  terms of the cost; a column is omitted if it is 0 for all workers
  cost       sum of the terms: seconds for latency, blocks for classic; the lowest wins. Below the table: workers
             without measured step times, whose seconds are assumed or estimated

With prefill workers: the prefill mode and its predicted costs, then a table for prefill workers and one for decode
workers (docs/journey.md, prefill modes).
"""

SETTINGS = CLIENT_GROUPS

_USUAL = "events, exact"
_WIDTH = 140
"""Width if stdout is not a terminal."""
_LIMITS = Deadlines(connect_s=5.0, first_s=15.0, between_s=15.0, total_s=20.0)
_decode = msgspec.msgpack.Decoder(Explanation).decode
_decode_json = msgspec.json.Decoder(Explanation).decode
_MODES = {
    "local": "the decode worker computes the prompt",
    "remote": "a prefill worker computes the prompt, then a decode worker the answer",
    "prefill_worker": "a prefill worker computes prompt and answer, since decode workers are overloaded",
}
_ATTACHED_ENGINE = "remote"
_NO_TIMES = "attached servers publish no step times"
_URL_REMEDY = (
    "use the URL of the frontend's admin port (`kvolt status --json` on its machine), or select its cluster with "
    "--join, --discovery-path or --namespace"
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="Prompt text; - reads stdin.")
    option(parser, "--chat", "FILE", "JSON request body with `messages` or `prompt`.")
    option(parser, "--tokens", "IDS", "Comma-separated token ids, or @FILE.")
    option(parser, "--model", None, "Model or adapter. Default: the only model served.")
    option(
        parser,
        "--url",
        None,
        "Frontend to query: URL of its admin port, or its public URL if it is registered "
        "in this discovery. Default: any registered one.",
    )
    switch(parser, "--json", "Print JSON.")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    request = ExplainRoute(body_of(args))

    async def ask() -> int:
        explanation = None
        if args.url is not None:
            explanation = await _ask_admin_port(ServerUrl.parse(args.url), request.body)
        if explanation is None:
            explanation = await _ask_registered(loaded.settings, args.url, request)
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(explanation), indent=2).decode())
        else:
            show(explanation, Console(width=None if sys.stdout.isatty() else _WIDTH))
        return 0 if explanation.candidates else 1

    return run_loop(ask)


async def _ask_admin_port(url: ServerUrl, body: bytes) -> Explanation | None:
    """Explanation of the admin port at a URL; None if the URL is not one of an admin port."""
    async with HttpClient(url.of_server()) as client:
        if (await client.fetch("/status", _LIMITS.connect_s)).status != 200:
            return None
        response = await client.fetch("/router/explain", _LIMITS.total_s, body)
    if response.status != 200:
        message = error_message(read_json(response.body), response.body)
        raise KvoltError(f"{url.text} responded {response.status}: {message}")
    return _decode_json(response.body)


async def _ask_registered(settings: Settings, url: str | None, request: ExplainRoute) -> Explanation:
    async with visit(settings) as cluster:
        try:
            frontend = (await find_frontends(cluster, settings, url))[0]
        except (ConfigError, Unavailable) as error:
            if url is None:
                raise
            raise type(error)(error.message, **{**error.fields, "remedy": _URL_REMEDY}) from error
        to = Destination(frontend.address, FRONTEND_EXPLAIN_ENDPOINT)
        async with await cluster.open(to, request, _LIMITS, _decode) as stream:
            explanation: Explanation | None = await anext(stream, None)
    if explanation is None:
        raise KvoltError(f"{frontend.process} closed the stream without a response")
    return explanation


# --- the request


def body_of(args: argparse.Namespace) -> bytes:
    """Request body for the frontend; ConfigError unless exactly one prompt is specified."""
    prompts = [each for each in (args.prompt, args.chat, args.tokens) if each is not None]
    if len(prompts) != 1:
        raise ConfigError(
            "several prompts are specified" if prompts else "no prompt is specified",
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
            f"{name} is not a JSON object: {error}",
            key="chat",
            remedy='write a request body such as {"messages": [...]}',
        ) from error
    return body


def _token_ids(text: str) -> list[int]:
    try:
        return [int(each) for each in text.replace(",", " ").replace("[", " ").replace("]", " ").split()]
    except ValueError as error:
        raise ConfigError(
            f"invalid token ids: {error}", key="tokens", remedy="for example --tokens 1,2,3"
        ) from error


# --- the output


def show(explanation: Explanation, console: Console) -> None:
    console.print(
        f"{explanation.prompt_tokens} prompt tokens, {explanation.num_blocks} full blocks of {explanation.block_size}; "
        f"about {explanation.output_tokens:.0f} output tokens expected. "
        f"Policy [bold]{explanation.policy or 'unnamed'}[/bold], decided by {explanation.decided_by}.",
        highlight=False,
    )
    prefill = explanation.prefill
    if prefill is None:
        _show_workers(explanation, console)
        return
    console.print(prefill_text(prefill), highlight=False)
    console.print("\nPrefill workers:", style="bold")
    _show_workers(prefill.workers, console)
    after = ", after the transfer" if prefill.mode == "remote" else ""
    console.print(f"\nDecode workers{after}:", style="bold")
    _show_workers(explanation, console)


def prefill_text(prefill: PrefillExplanation) -> str:
    """The prefill mode in one line."""
    costs = ", ".join(
        f"{mode} {cost:.4g}" for mode, cost in sorted(prefill.mode_costs.items(), key=lambda item: item[1])
    )
    compared = f" Predicted cost in seconds: {costs}." if costs else " Predicted costs did not decide."
    return f"Prefill mode [bold]{prefill.mode}[/bold]: {_MODES.get(prefill.mode, '')}.{compared}"


def _show_workers(explanation: Explanation, console: Console) -> None:
    """Candidates with costs, the reasons, and excluded workers."""
    if explanation.candidates:
        console.print(_table(explanation))
    for line in reasons(explanation):
        console.print(Text(line))
    for source, names in _by_source(explanation.candidates).items():
        if source != _USUAL:
            console.print(Text(f"{names}: cached blocks are known from {source}."))
    if explanation.excluded_workers:
        console.print(Text("\nExcluded:"))
        for each in explanation.excluded_workers:
            console.print(Text(f"  {each.process} ({each.instance}): {each.reason}"))


def _by_source(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Names of the workers by the source of their index entries."""
    names: dict[str, dict[str, None]] = {}
    for each in candidates:
        names.setdefault(each.index_source, {})[each.process] = None
    return {source: ", ".join(workers) for source, workers in names.items()}


def _table(explanation: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("  worker", no_wrap=True)
    terms = _shown_terms(explanation.candidates)
    names = (name.replace("_", " ") for name in terms)
    for name in ("overlap", "decoding", "blocks", "pace", "fails", *names, "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in explanation.candidates:
        table.add_row(*_row(each, terms), style="bold" if each.terms.is_chosen else None)
    return table


def _shown_terms(candidates: Sequence[Candidate]) -> list[str]:
    """Names of the cost terms that are not 0 for all workers."""
    names = dict.fromkeys(name for each in candidates for name in each.terms.cost_terms)
    return [name for name in names if any(each.terms.cost_terms.get(name) for each in candidates)]


def _row(candidate: Candidate, cost_terms: Sequence[str]) -> tuple[str, ...]:
    terms = candidate.terms
    incoming = terms.overlap_blocks - terms.held_blocks
    total = f"/{terms.total_blocks:.0f}" if terms.total_blocks else ""
    rank = f" rank {terms.dp_rank}" if terms.dp_rank else ""
    return (
        f"{'→' if terms.is_chosen else ' '} {candidate.process}{rank}{' (full)' if terms.is_saturated else ''}",
        f"{terms.overlap_blocks:.0f}" + (f" (+{incoming:.0f})" if incoming else ""),
        f"{terms.decoding:.0f}",
        f"{terms.blocks:.0f}{total}",
        f"{terms.pace:.2f}",
        f"{terms.failure_rate:.0%}" if terms.failure_rate else "",
        *(f"{terms.cost_terms.get(name, 0.0):.4g}" for name in cost_terms),
        f"{terms.cost:.4g}",
    )


def reasons(explanation: Explanation) -> list[str]:
    """Reasons for the decision, one sentence each."""
    if not explanation.candidates:
        return [f"No worker can take the request: {explanation.problem}."]
    chosen = next(each for each in explanation.candidates if each.terms.is_chosen)
    cheaper = [each for each in explanation.candidates if each.terms.cost < chosen.terms.cost]
    lines = []
    if all(each.terms.is_saturated for each in explanation.candidates):
        ahead = f" behind {explanation.num_waiting} others" if explanation.num_waiting else ""
        lines.append(f"All workers are saturated: the request would wait in the router queue{ahead}.")
    elif len(explanation.candidates) == 1:
        lines.append(f"{chosen.process} is the only candidate.")
    elif any(each.terms.is_saturated for each in cheaper):
        lines.append(f"{chosen.process} has the lowest cost of the workers that are not saturated.")
    elif cheaper:
        lines.append(f"{chosen.process} was drawn at random: router.temperature is above 0.")
    else:
        others = [each for each in explanation.candidates if each is not chosen]
        least = min(each.terms.cost for each in others)
        ties = sum(each.terms.cost == chosen.terms.cost for each in others)
        if ties:
            lines.append(f"{ties + 1} workers have the same cost: {chosen.process} was drawn at random.")
        else:
            lines.append(
                f"{chosen.process} has the lowest cost: {chosen.terms.cost:.4g}; the next is {least:.4g}."
            )
    best = max(each.terms.overlap_blocks for each in explanation.candidates)
    if best > chosen.terms.overlap_blocks:
        lines.append(
            f"Another worker holds {best:.0f} blocks of the prompt, {best - chosen.terms.overlap_blocks:.0f} more, but "
            "its queue and load cost more than computing them again."
        )
    assumed: dict[str, dict[str, None]] = {}
    for each in explanation.candidates:
        if not each.terms.has_step_model and explanation.policy != "classic":  # which counts blocks
            is_attached = each.engine == _ATTACHED_ENGINE
            why = _NO_TIMES if is_attached else "no step model is registered (see the log of the worker)"
            assumed.setdefault(why, {})[each.process] = None
    lines += [
        f"Assumed, not measured: the times of {', '.join(names)} are those of an 8B model on a large GPU, since {why}."
        for why, names in assumed.items()
    ]
    estimated = ", ".join(
        dict.fromkeys(each.process for each in explanation.candidates if each.has_estimated_times)
    )
    if estimated and explanation.policy != "classic":
        lines.append(
            f"Estimated from a few measured steps: the times of {estimated}. Costs and the prefill mode may be wrong "
            "until requests correct them."
        )
    if chosen.terms.affinity:
        lines.append(f"Session affinity: {chosen.process} served this session before.")
    return lines
