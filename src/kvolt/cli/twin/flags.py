"""The flags that `kvolt twin` and `kvolt twin sweep` share, and what they mean: the cluster, the trace, the limits."""

from __future__ import annotations

import argparse
import math
from typing import Any, get_args

import msgspec

from kvolt.bench.load.report import Setting
from kvolt.bench.load.sla import parse_sla
from kvolt.bench.traces import limit, read_trace, scale_time, small_trace, start_at_zero
from kvolt.cli.flags import option, optional, repeated
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord
from kvolt.engines.registry import check_arguments, parse_argument
from kvolt.engines.sim.engine import SimArguments
from kvolt.kv.tiers.sizes import parse_capacity
from kvolt.router.registry import ROUTERS, find_router
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.twin.cluster import PrefillChoice, TwinSettings
from kvolt.twin.trace_block_tiers import TwinTiers


def add_cluster(parser: argparse.ArgumentParser) -> None:
    optional(
        parser, "trace", "TRACE", "Trace in any format of `kvolt trace`. Default: a small built-in trace."
    )
    group = parser.add_argument_group("cluster")
    option(
        group,
        "--workers",
        "N",
        "Number of aggregated workers, or of decode workers with --prefill.",
        int,
        default=1,
    )
    option(group, "--prefill", "N", "Number of prefill workers.", int, default=0)
    group.add_argument(
        "--prefill-choice",
        choices=get_args(PrefillChoice),
        default="predicted",
        help="When to use the prefill workers: `predicted` cost, with the limits of --sla as targets, or always. "
        "[default: predicted]",
    )
    option(group, "--gpus", "N", "GPUs per worker, for GPU-seconds.", int, default=1)
    option(
        group,
        "--router",
        "POLICY",
        f"Routing policy: {', '.join(ROUTERS)}, or FILE.py:FUNCTION.",
        default=next(iter(ROUTERS)),
    )
    repeated(group, "--router-arg", "KEY=VALUE", "Router setting (see `kvolt config describe router`).")
    option(group, "--preset", None, "Step latency model: a name or a file (see `kvolt engine list sim`).")
    repeated(group, "--arg", "KEY=VALUE", "Argument of the sim engine (see `kvolt engine list sim`).")
    option(
        group,
        "--kv-host",
        "SIZE",
        "Host memory for KV blocks of each worker: 64GiB, 1000blocks, or 2x the device capacity.",
    )
    option(group, "--kv-disk", "SIZE", "Disk space for KV blocks of each worker.")
    option(group, "--kv-eviction", "POLICY", "Eviction policy: lru, s3fifo or tinylfu.", default="lru")
    option(group, "--seed", None, "Random seed.", int, default=0)
    group = parser.add_argument_group("load")
    speed = group.add_mutually_exclusive_group()
    option(speed, "--speed", "X", "Speed-up of arrivals.", float, default=1.0)
    option(
        speed, "--rate", "R", "Mean requests per second: the speed-up that gives the trace this rate.", float
    )
    option(group, "--limit", "N", "Use only the first N requests.", int)
    option(group, "--sla", "LIMITS", "Limits for goodput, such as ttft=500ms,itl=50ms.")


def settings_of(args: argparse.Namespace) -> TwinSettings:
    """Validated settings; ConfigError if a flag is invalid."""
    if args.workers < 1:
        raise ConfigError("--workers is below 1", key="workers", remedy="must be 1 or more")
    if args.prefill < 0:
        raise ConfigError("--prefill is below 0", key="prefill", remedy="must be 0 or more")
    if args.gpus < 1:
        raise ConfigError("--gpus is below 1", key="gpus", remedy="must be 1 or more")
    arguments: dict[str, Any] = dict(parse_argument(text) for text in args.arg)
    if args.preset is not None:
        arguments["preset"] = args.preset
    engine = check_arguments("sim", arguments)
    assert isinstance(engine, SimArguments)
    routing = _routing_of(args.router_arg)
    limits = parse_sla(args.sla).limits if args.sla else {}
    find_router(args.router, routing)
    return TwinSettings(
        num_workers=args.workers,
        num_prefill=args.prefill,
        prefill_choice=args.prefill_choice,
        target_ttft_s=limits.get("ttft"),
        target_itl_s=limits.get("itl"),
        gpus_per_worker=args.gpus,
        router=args.router,
        routing=routing,
        engine=engine,
        tiers=_tiers_of(args, engine),
        seed=args.seed,
    )


def _tiers_of(args: argparse.Namespace, engine: SimArguments) -> TwinTiers:
    block_bytes = engine.block_size * engine.kv_bytes_per_token
    sizes = {
        name: parse_capacity(text, f"kv_{name}").blocks(block_bytes, engine.kv_blocks)
        for name, text in (("host", args.kv_host), ("disk", args.kv_disk))
        if text is not None
    }
    try:
        return TwinTiers(
            host_blocks=sizes.get("host", 0), disk_blocks=sizes.get("disk", 0), eviction=args.kv_eviction
        )
    except ValueError as error:
        raise ConfigError(
            str(error), key="kv_host", remedy="set --kv-host, with or without --kv-disk"
        ) from None


def _routing_of(assignments: list[str]) -> RouterSettings:
    values = dict(parse_argument(text, flag="--router-arg") for text in assignments)
    try:
        return msgspec.convert(values, RouterSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--router-arg: {error}",
            key="router_arg",
            remedy="`kvolt config describe router` lists the settings",
        ) from error


def records_of(args: argparse.Namespace) -> list[TraceRecord]:
    for name in ("speed", "rate"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name} is not above 0", key=name, remedy=f"for example --{name} 2")
    records = small_trace() if args.trace is None else read_trace(args.trace)
    if args.limit is not None:
        records = limit(records, args.limit)
    records = list(start_at_zero(records))
    speed = args.speed
    if args.rate is not None:
        if not records or not records[-1].timestamp:
            raise ConfigError(
                "the trace has no rate: its requests arrive at once", key="rate", remedy="omit --rate"
            )
        speed = args.rate * records[-1].timestamp / 1000 / len(records)
        if not 1e-9 < speed < 1e9:
            problem = f"--rate {args.rate:g} is too far from the rate of the trace"
            raise ConfigError(problem, key="rate", remedy="use --speed")
    return list(scale_time(records, speed))


def report_settings(args: argparse.Namespace, settings: TwinSettings) -> dict[str, Setting]:
    """Settings that determine the results, for reports."""
    return {
        "trace": args.trace or "small",
        "workers": settings.num_workers,
        "prefill": settings.num_prefill,
        "prefill choice": settings.prefill_choice if settings.num_prefill else None,
        "gpus": settings.gpus_per_worker,
        "router": settings.router,
        "preset": settings.engine.preset,
        "host blocks": settings.tiers.host_blocks or None,
        "disk blocks": settings.tiers.disk_blocks or None,
        "eviction": settings.tiers.eviction if settings.tiers.host_blocks else None,
        "speed": args.speed if args.rate is None else None,
        "rate": args.rate,
        "limit": args.limit,
        "seed": args.seed,
        "arguments": " ".join(args.arg),
        "router arguments": " ".join(args.router_arg),
    }
