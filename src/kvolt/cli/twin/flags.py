"""The flags that `kvolt twin` and `kvolt twin sweep` share, and what they mean: the cluster, the trace, the limits."""

from __future__ import annotations

import argparse
from typing import Any, get_args

import msgspec

from kvolt.bench.load.report import Setting
from kvolt.bench.load.sla import parse_sla
from kvolt.bench.traces import limit, read_trace, scale_time, small_trace, start_at_zero
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
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="any format that `kvolt trace` reads")
    group = parser.add_argument_group("the cluster")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="simulated workers (default: 1)")
    group.add_argument(
        "--prefill",
        type=int,
        default=0,
        metavar="N",
        help="workers besides that compute prompts for the others, which then only decode (default: 0)",
    )
    group.add_argument(
        "--prefill-choice",
        choices=get_args(PrefillChoice),
        default="predicted",
        help="whether those compute a prompt: by what each way would cost, with the limits of --sla as what was "
        "promised; or always (default: predicted)",
    )
    group.add_argument("--gpus", type=int, default=1, metavar="N", help="of each worker, for GPU-seconds")
    group.add_argument(
        "--router",
        default=next(iter(ROUTERS)),
        metavar="NAME",
        help=f"who gets a request: {', '.join(ROUTERS)}, or FILE.py:FUNCTION (default: {next(iter(ROUTERS))})",
    )
    group.add_argument(
        "--router-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the router, as the section `router` of `kvolt config env` tells them (repeat for more)",
    )
    group.add_argument("--preset", help="how long steps take: a name or a file (`kvolt engine list sim`)")
    group.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of the sim engine, as `kvolt engine list sim` tells them (repeat for more)",
    )
    group.add_argument(
        "--kv-host",
        metavar="SIZE",
        help="memory of each worker's host for KV that leaves its device: 64GiB, 1000blocks, or 2x the device's blocks",
    )
    group.add_argument("--kv-disk", metavar="SIZE", help="and below that on a disk")
    group.add_argument(
        "--kv-eviction", default="lru", metavar="RULE", help="lru, s3fifo or tinylfu (default: lru)"
    )
    group.add_argument("--seed", type=int, default=0)
    group = parser.add_argument_group("what is asked")
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="arrivals X times as fast")
    group.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    group.add_argument("--sla", help="as `kvolt bench --sla`, for example ttft=500ms,itl=50ms")


def settings_of(args: argparse.Namespace) -> TwinSettings:
    """ConfigError says what is wrong, before anything runs."""
    if args.workers < 1:
        raise ConfigError("a twin needs a worker", key="workers", remedy="give --workers 1 or more")
    if args.prefill < 0:
        raise ConfigError("fewer than no workers", key="prefill", remedy="give --prefill 0 or more")
    if args.gpus < 1:
        raise ConfigError("a worker has a GPU", key="gpus", remedy="give --gpus 1 or more")
    given: dict[str, Any] = dict(parse_argument(text) for text in args.arg)
    if args.preset is not None:
        given["preset"] = args.preset
    engine = check_arguments("sim", given)
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
            str(error), key="kv_host", remedy="give --kv-host 64GiB, and --kv-disk besides"
        ) from None


def _routing_of(given: list[str]) -> RouterSettings:
    values = dict(parse_argument(text, flag="--router-arg") for text in given)
    try:
        return msgspec.convert(values, RouterSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--router-arg: {error}",
            key="router_arg",
            remedy="`kvolt config env` lists the settings of `router`",
        ) from error


def records_of(args: argparse.Namespace) -> list[TraceRecord]:
    if args.speed <= 0:
        raise ConfigError("a speed is above 0", key="speed", remedy="give for example --speed 2")
    records = small_trace() if args.trace is None else read_trace(args.trace)
    if args.limit is not None:
        records = limit(records, args.limit)
    return list(scale_time(start_at_zero(records), args.speed))


def told_settings(args: argparse.Namespace, settings: TwinSettings) -> dict[str, Setting]:
    """What decides the figures, for reports."""
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
        "speed": args.speed,
        "limit": args.limit,
        "seed": args.seed,
        "arguments": " ".join(args.arg),
        "router arguments": " ".join(args.router_arg),
    }
