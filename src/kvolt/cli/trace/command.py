"""`kvolt trace`: record, analyze, convert and generate request traces; list public ones."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from kvolt.bench.traces import (
    PUBLIC_TRACES,
    RECIPES,
    LengthBounds,
    ReadOptions,
    analyze,
    cut,
    filter_lengths,
    find_public,
    limit,
    make_trace,
    read_trace,
    reblock,
    renumber,
    sample,
    scale_time,
    sort_by_time,
    start_at_zero,
    write_trace,
)
from kvolt.bench.traces.analysis import LRU_BLOCKS
from kvolt.bench.traces.sources import FileState, FoundTrace
from kvolt.bench.traces.synthetic import Lognormal
from kvolt.cli import flags
from kvolt.cli.flags import option, optional, switch
from kvolt.cli.trace.page import analysis_text, sources_text
from kvolt.cli.trace.tiers import add_tier_flags, tier_findings, tiers_text
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord
from kvolt.runtime.config.loader import LoadedConfig

HELP = """
Record, analyze, convert and generate request traces. A trace has one request per line: arrival time, prompt and
output length, and hashes of its prompt blocks; no text. Reads Mooncake JSONL, Azure CSV and ShareGPT JSON, also as .gz.

Examples:
  kvolt trace record http://127.0.0.1:8000 --out trace.jsonl --duration 60s
  kvolt trace analyze trace.jsonl                          rates, lengths, prefix reuse
  kvolt trace analyze trace.jsonl --lru 1000,20000         hit rates of LRU caches of these sizes, in blocks
  kvolt trace analyze trace.jsonl --tiers host=64GiB,disk=1TiB
                                                           hit rates of KV tiers of these sizes
  kvolt trace convert chats.json chats.jsonl               convert to JSON lines
  kvolt trace convert a.jsonl b.jsonl --speed 2 --limit 500 --block-size 64
  kvolt trace make small.jsonl --recipe small              the small trace that the tests use
  kvolt trace make big.jsonl.gz --requests 100000 --seed 7 --rate 20 --burstiness 0.2
  kvolt trace sources                                      public traces: source, licence, sha256

KVOLT_TRACES names the directory of public traces for tests and benchmarks.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(
        metavar="record|analyze|convert|make|sources", required=True, dest="trace_verb"
    )
    _add_record(verbs.add_parser("record", help="record the requests of running frontends until Ctrl-C"))
    analyzing = verbs.add_parser("analyze", help="show rates, lengths, sessions and prefix reuse")
    analyzing.add_argument("file", metavar="FILE", help="Trace in any supported format.")
    option(
        analyzing,
        "--lru",
        "N,...",
        f"LRU cache sizes, in blocks. [default: {','.join(str(size) for size in LRU_BLOCKS)}]",
    )
    add_tier_flags(analyzing)
    analyzing.set_defaults(without_config=_analyze)
    _add_convert(verbs.add_parser("convert", help="convert, filter and scale a trace"), analyzing)
    _add_make(verbs.add_parser("make", help="generate a trace of chats with shared system prompts"))
    sources = verbs.add_parser("sources", help="list public traces and verify those in KVOLT_TRACES")
    sources.set_defaults(without_config=_sources)
    for each in (analyzing, sources):
        switch(each, "--json", "Print JSON.")


def _add_record(parser: argparse.ArgumentParser) -> None:
    optional(parser, "url", "URL", "URL of one frontend. Default: all frontends of the namespace.")
    option(parser, "--out", "FILE", "Output file; compressed if it ends in .gz.", default="trace.jsonl")
    option(
        parser,
        "--duration",
        "TIME",
        "Record requests that arrive within this time, such as 60s or 5m. Default: until Ctrl-C.",
    )
    option(parser, "--model", "NAME", "Record only this model or adapter. Default: all.")
    switch(parser, "--force", "Overwrite an existing file.")
    switch(parser, "--quiet", "Show no progress.")
    flags.add_settings(parser, flags.CLIENT_GROUPS)


def _add_convert(parser: argparse.ArgumentParser, analyzing: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="Trace in any supported format.")
    parser.add_argument(
        "output", metavar="OUT", help="Output file (JSON lines); compressed if it ends in .gz."
    )
    for each in (parser, analyzing):
        option(
            each,
            "--trace-block-size",
            "TOKENS",
            "Tokens per hash id, if the file does not state it. Default: 512; 16 for chats.",
            _positive,
        )
    for flag, kind, metavar, text in (
        ("--speed", float, "FACTOR", "Divide arrival times by this factor."),
        ("--start", float, "SECONDS", "Drop requests before this time."),
        ("--end", float, "SECONDS", "Drop requests from this time on."),
        ("--sample", float, "SHARE", "Keep a random fraction, 0 to 1, of sessions."),
        ("--limit", int, "N", "Keep the first N requests after all other filters."),
        ("--block-size", _positive, "TOKENS", "Rehash to blocks of this size, preserving shared prefixes."),
        ("--min-input", int, "TOKENS", "Minimum prompt length."),
        ("--max-input", int, "TOKENS", "Maximum prompt length."),
        ("--min-output", int, "TOKENS", "Minimum output length."),
        ("--max-output", int, "TOKENS", "Maximum output length."),
        ("--max-total", int, "TOKENS", "Maximum prompt plus output length."),
    ):
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    option(parser, "--seed", None, "Seed of --sample.", int, default=0)
    switch(parser, "--sort", "Sort by arrival time; reads the whole trace into memory.")
    switch(parser, "--renumber", "Renumber hash ids from 0.")
    parser.set_defaults(without_config=_convert)


def _add_make(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "output", metavar="OUT", help="Output file (JSON lines); compressed if it ends in .gz."
    )
    option(parser, "--recipe", None, "Preset for the other options.", default="chat", choices=sorted(RECIPES))
    for flag, kind, metavar, text in (
        ("--requests", int, "N", "Number of requests."),
        ("--seed", int, "N", "Random seed."),
        (
            "--rate",
            float,
            "PER_SECOND",
            "Requests per second in the steady state: sessions per second times --turns. The mean is lower, and "
            "printed: the first sessions have no later turns yet, and --max-context ends long ones.",
        ),
        ("--burstiness", float, "X", "Arrival process: 1 is Poisson, 0.1 bursty, 10 steady."),
        ("--turns", float, "N", "Mean turns per session."),
        ("--think", float, "SECONDS", "Mean pause between turns."),
        ("--system-prompts", int, "N", "Number of shared system prompts; 0 for none."),
        ("--system-tokens", float, "N", "Median system prompt length."),
        ("--question-tokens", float, "N", "Median user message length."),
        ("--answer-tokens", float, "N", "Median output length."),
        ("--max-context", int, "TOKENS", "Maximum prompt plus output length."),
        ("--block-size", _positive, "TOKENS", "Tokens per hash id."),
    ):
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    parser.set_defaults(without_config=_make)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Run `record`, the only sub-verb that uses the config."""
    from kvolt.cli.trace.record import record  # deferred: imports the network stack

    return record(args, loaded)


def _analyze(args: argparse.Namespace) -> int:
    if args.tiers:
        tiers = tier_findings(list(read_trace(args.file, _read_options(args))), args)
        print(msgspec.json.encode(tiers).decode() if args.json else tiers_text(tiers))
        return 0
    analysis = analyze(read_trace(args.file, _read_options(args)), _lru_sizes(args.lru))
    print(msgspec.json.encode(analysis).decode() if args.json else analysis_text(analysis))
    return 0


def _convert(args: argparse.Namespace) -> int:
    records: Iterable[TraceRecord] = read_trace(args.input, _read_options(args))
    _write(args.output, _changed(records, args))
    return 0


def _write(path: str, records: Iterable[TraceRecord]) -> None:
    """Write the trace; print its length and mean rate."""
    first_ms, last_ms = math.inf, -math.inf

    def timed() -> Iterator[TraceRecord]:
        nonlocal first_ms, last_ms
        for record in records:
            first_ms, last_ms = min(first_ms, record.timestamp), max(last_ms, record.timestamp)
            yield record

    written = write_trace(path, timed())
    span_s = (last_ms - first_ms) / 1000
    rate = f", {written / span_s:.3g}/s over {span_s:.1f} s" if span_s > 0 else ""
    print(f"{written} requests in {path}{rate}")


def _changed(records: Iterable[TraceRecord], args: argparse.Namespace) -> Iterable[TraceRecord]:
    """Apply the flags in a fixed order, so that times and lengths always refer to the input."""
    if args.sort:
        records = sort_by_time(records)
    if args.start is not None or args.end is not None:
        end_ms = math.inf if args.end is None else args.end * 1000
        records = start_at_zero(cut(records, (args.start or 0.0) * 1000, end_ms))
    bounds = LengthBounds(
        min_input=args.min_input or 0,
        max_input=math.inf if args.max_input is None else args.max_input,
        min_output=args.min_output or 0,
        max_output=math.inf if args.max_output is None else args.max_output,
        max_total=math.inf if args.max_total is None else args.max_total,
    )
    records = filter_lengths(records, bounds)
    if args.sample is not None:
        records = sample(records, args.sample, args.seed)
    if args.limit is not None:
        records = limit(records, args.limit)
    if args.speed is not None:
        records = scale_time(records, args.speed)
    if args.block_size is not None:
        records = reblock(records, args.block_size)
    return renumber(records) if args.renumber else records


def _make(args: argparse.Namespace) -> int:
    recipe = RECIPES[args.recipe]
    plain = {
        "requests": args.requests,
        "seed": args.seed,
        "rate_per_s": args.rate,
        "burstiness": args.burstiness,
        "turns": args.turns,
        "think_s": args.think,
        "system_prompts": args.system_prompts,
        "max_context": args.max_context,
        "block_size": args.block_size,
    }
    recipe = replace(recipe, **{name: value for name, value in plain.items() if value is not None})
    medians = {"system": args.system_tokens, "question": args.question_tokens, "answer": args.answer_tokens}
    for name, median in medians.items():
        lengths = getattr(recipe, name)
        if median is None:
            continue
        if not median >= 1:
            raise ConfigError(
                f"--{name}-tokens {median:g} is under 1", key="flags", remedy="give a length in tokens"
            )
        assert isinstance(lengths, Lognormal)
        recipe = replace(
            recipe, **{name: replace(lengths, median=median, max=max(lengths.max, int(8 * median)))}
        )
    _write(args.output, make_trace(recipe))
    return 0


def _sources(args: argparse.Namespace) -> int:
    folder = os.environ.get("KVOLT_TRACES")
    traces = (
        find_public(folder) if folder else [FoundTrace(trace, FileState.MISSING) for trace in PUBLIC_TRACES]
    )
    print(msgspec.json.encode(traces).decode() if args.json else sources_text(traces, folder))
    return 1 if any(each.state is FileState.DIFFERS for each in traces) else 0


def _read_options(args: argparse.Namespace) -> ReadOptions:
    return ReadOptions(block_size=args.trace_block_size, in_order=not getattr(args, "sort", False))


def _lru_sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return LRU_BLOCKS
    try:
        return tuple(_positive(part) for part in text.split(","))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--lru {text}: {error}", key="flags", remedy="as in --lru 1000,20000") from error


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
