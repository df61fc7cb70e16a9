"""`kvolt trace`: record traces, look into them, change them, make them, and know where public ones come from."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable

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
from kvolt.cli.trace.page import analysis_text, sources_text
from kvolt.cli.trace.tiers import add_tier_flags, tier_findings, tiers_text
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord
from kvolt.runtime.config.loader import LoadedConfig

HELP = """
A trace is one request per line: when it came, how long prompt and answer were, which blocks of the prompt were seen
before. No text. Mooncake JSONL, Azure CSV and ShareGPT JSON are read as they are, also as .gz, whatever their names.

  kvolt trace record http://127.0.0.1:8000 --out trace.jsonl --duration 60s
                                                           what a running frontend is asked
  kvolt trace analyze trace.jsonl                          rates, lengths, what a prefix cache could find
  kvolt trace analyze trace.jsonl --lru 1000,20000         hit rates of LRU caches of so many blocks
  kvolt trace analyze trace.jsonl --tiers host=64GiB,disk=1TiB
                                                           what KV tiers of these sizes would find
  kvolt trace convert chats.json chats.jsonl               any format to JSON lines
  kvolt trace convert a.jsonl b.jsonl --speed 2 --limit 500 --block-size 64
  kvolt trace make small.jsonl --recipe small              the project's own small trace
  kvolt trace make big.jsonl.gz --requests 100000 --seed 7 --rate 20 --burstiness 0.2
  kvolt trace sources                                      public traces: source, licence, sha256

KVOLT_TRACES names the folder in which tests and benchmarks look for public traces.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(
        metavar="record|analyze|convert|make|sources", required=True, dest="trace_verb"
    )
    _add_record(verbs.add_parser("record", help="what running frontends are asked; Ctrl-C ends and writes"))
    analyzing = verbs.add_parser("analyze", help="rates, lengths, sessions, prefix reuse")
    analyzing.add_argument("file", metavar="FILE", help="a trace of any known format")
    analyzing.add_argument(
        "--lru",
        metavar="N,...",
        help=f"cache sizes in blocks (default: {','.join(str(size) for size in LRU_BLOCKS)})",
    )
    add_tier_flags(analyzing)
    analyzing.set_defaults(without_config=_analyze)
    _add_convert(verbs.add_parser("convert", help="change a trace, or its format"), analyzing)
    _add_make(verbs.add_parser("make", help="a synthetic trace: chats with shared system prompts"))
    sources = verbs.add_parser("sources", help="public traces; checks those in KVOLT_TRACES")
    sources.set_defaults(without_config=_sources)
    for each in (analyzing, sources):
        each.add_argument("--json", action="store_true", help="for scripts")


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help="of one frontend, as http://127.0.0.1:8000 (default: all frontends of the namespace)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        default="trace.jsonl",
        help="compressed if it ends in .gz (default: trace.jsonl)",
    )
    parser.add_argument(
        "--duration",
        metavar="TIME",
        help="e.g. 60s or 5m, then until those that came have ended (default: until Ctrl-C)",
    )
    parser.add_argument("--model", metavar="NAME", help="only this model or adapter (default: all)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    flags.add_settings(parser, None, ("discovery", "plane", "log"))


def _add_convert(parser: argparse.ArgumentParser, analyzing: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="a trace of any known format")
    parser.add_argument("output", metavar="OUT", help="JSON lines; compressed if the name ends in .gz")
    for each in (parser, analyzing):
        each.add_argument(
            "--trace-block-size",
            type=_positive,
            metavar="TOKENS",
            help="per hash id of the file, where it does not say (default: 512; chats: 16)",
        )
    for flag, kind, metavar, text in (
        ("--speed", float, "FACTOR", "2 sends twice as fast"),
        ("--start", float, "SECONDS", "leave out what comes before"),
        ("--end", float, "SECONDS", "leave out what comes from then on"),
        ("--sample", float, "SHARE", "keep so much of it, 0 to 1; sessions stay whole"),
        ("--limit", int, "N", "keep the first N requests, after all other choices"),
        ("--block-size", _positive, "TOKENS", "hash ids for blocks of this size; equal prefixes stay equal"),
        ("--min-input", int, "TOKENS", "shortest prompt to keep"),
        ("--max-input", int, "TOKENS", "longest prompt to keep"),
        ("--min-output", int, "TOKENS", "shortest answer to keep"),
        ("--max-output", int, "TOKENS", "longest answer to keep"),
        ("--max-total", int, "TOKENS", "longest prompt and answer together: a model's context"),
    ):
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    parser.add_argument("--seed", type=int, default=0, help="which sample (default: 0)")
    parser.add_argument(
        "--sort", action="store_true", help="put requests in order of time; holds all of them"
    )
    parser.add_argument("--renumber", action="store_true", help="hash ids as 0, 1, 2 ...: shorter lines")
    parser.set_defaults(without_config=_convert)


def _add_make(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUT", help="JSON lines; compressed if the name ends in .gz")
    parser.add_argument(
        "--recipe",
        choices=sorted(RECIPES),
        default="chat",
        help=f"what the rest starts from: {', '.join(RECIPES)} (default: chat)",
    )
    for flag, kind, metavar, text in (
        ("--requests", int, "N", "how many"),
        ("--seed", int, "N", "another seed, another trace of the same kind"),
        ("--rate", float, "PER_SECOND", "requests per second on average"),
        ("--burstiness", float, "X", "1 is Poisson, 0.1 comes in bursts, 10 is steady"),
        ("--turns", float, "N", "questions per session on average"),
        ("--think", float, "SECONDS", "between an answer and the next question"),
        ("--system-prompts", int, "N", "how many different ones are shared; 0 for none"),
        ("--system-tokens", float, "N", "their median length"),
        ("--question-tokens", float, "N", "median length of what a turn adds"),
        ("--answer-tokens", float, "N", "median length of answers"),
        ("--max-context", int, "TOKENS", "longest prompt and answer together"),
        ("--block-size", _positive, "TOKENS", "tokens per hash id"),
    ):
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    parser.set_defaults(without_config=_make)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Of the one sub-verb that needs to know where the cluster is."""
    from kvolt.cli.trace.record import record  # the network, which the other sub-verbs do without

    return record(args, loaded)


def _analyze(args: argparse.Namespace) -> int:
    if args.tiers:
        tiers = tier_findings(list(read_trace(args.file, _read_options(args))), args)
        print(msgspec.json.encode(tiers).decode() if args.json else tiers_text(tiers))
        return 0
    found = analyze(read_trace(args.file, _read_options(args)), _lru_sizes(args.lru))
    print(msgspec.json.encode(found).decode() if args.json else analysis_text(found))
    return 0


def _convert(args: argparse.Namespace) -> int:
    records: Iterable[TraceRecord] = read_trace(args.input, _read_options(args))
    written = write_trace(args.output, _changed(records, args))
    print(f"{written} requests in {args.output}")
    return 0


def _changed(records: Iterable[TraceRecord], args: argparse.Namespace) -> Iterable[TraceRecord]:
    """In an order in which each flag means the same whatever the others are: times and lengths are the input's."""
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
    written = write_trace(args.output, make_trace(recipe))
    print(f"{written} requests in {args.output}")
    return 0


def _sources(args: argparse.Namespace) -> int:
    folder = os.environ.get("KVOLT_TRACES")
    found = (
        find_public(folder) if folder else [FoundTrace(trace, FileState.MISSING) for trace in PUBLIC_TRACES]
    )
    print(msgspec.json.encode(found).decode() if args.json else sources_text(found, folder))
    return 1 if any(each.state is FileState.DIFFERS for each in found) else 0


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
