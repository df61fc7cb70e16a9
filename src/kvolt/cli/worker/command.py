"""`kvolt worker`: one engine behind an endpoint, or many of a kind that computes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvolt.cli.process import Process, run_process
from kvolt.cli.worker.tiers import add_tier_flags, are_wanted, resize_tiers, tiering_of, with_tiers
from kvolt.cli.worker.transfers import Transfers
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.registry import (
    AUTO,
    build_engine,
    build_follower,
    check_arguments,
    choose_engine,
    find_engine,
    merge_arguments,
)
from kvolt.kv.tiers.metrics import TierMetrics
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.config.settings import MAX_PER_PROCESS, WorkerSettings
from kvolt.worker.handoff_metrics import HandoffMetrics
from kvolt.worker.path_metrics import PathMetrics
from kvolt.worker.worker import Worker, WorkerOptions, stats_of

HELP = """
Start one worker. It registers through discovery and serves until it is stopped (Ctrl-C drains it).

Examples:
  kvolt worker                                  the first [[workers]] entry of the config
  kvolt worker Qwen/Qwen3-0.6B                  a model of the hub, a folder or a GGUF file
  kvolt worker --join 10.0.0.5:7400             join a frontend on another machine
  kvolt worker --group decode                   the [[workers]] entry named decode
  kvolt worker --arg dtype=float32              an argument of the engine (`kvolt engine list native`)
  kvolt worker --lora sql=./adapters/sql        with a LoRA adapter that clients choose as model "sql"
  kvolt worker --taint gpu=h100 --taint eu      properties that requests may demand or prefer
  kvolt worker --kv-host 8GiB --kv-disk 100GiB  keep KV that leaves the device, and find it again after a restart
  kvolt worker sim-tiny                         the simulated engine: no weights, no torch
  kvolt worker sim-tiny --workers 300           three hundred of them in one process, each registered by itself
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="model to serve (default: as the config says)")
    parser.add_argument("--group", help="name of the [[workers]] entry to run (default: the first)")
    parser.add_argument("--name", help="name of this process in logs and status (default: the group's)")
    parser.add_argument("--engine", help="what computes (default: as the config says)")
    parser.add_argument(
        "--devices", metavar="A,B", help="GPUs of this worker, by index (default: as the config says)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="workers in this process, for engines that can (sim) (default: as the config says, 1)",
    )
    parser.add_argument("--role", choices=[role.value for role in Role], help="what this worker does")
    parser.add_argument(
        "--taint",
        action="append",
        default=[],
        metavar="NAME",
        help="a property that requests may demand or prefer, besides those of the config (repeat for more)",
    )
    add_engine_flags(parser)
    add_tier_flags(parser)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="engine argument, as `kvolt engine list` tells them; VALUE is JSON or a word, and A.B=VALUE is the B of a "
        "section A (repeat for more)",
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="load a LoRA adapter, a folder as PEFT writes it; clients choose it by its NAME in place of the model's "
        "(repeat for more; POST /v1/load_lora_adapter on a frontend's admin port loads one later)",
    )


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    group = find_group(loaded.settings.workers, args.group)
    if args.model is not None or args.engine is not None:
        group = with_model(group, args.model or group.model, args.engine)
    count = group.per_process if args.workers is None else args.workers
    group = with_tiers(msgspec.structs.replace(group, per_process=count), args)
    if count > 1 and are_wanted(group.tiers):
        raise ConfigError(
            f"{count} workers in one process have no tiers",
            key="tiers",
            remedy="start a process for each worker",
        )
    engine_name, arguments = check_engine(with_arguments(group, args.arg, args.lora))
    devices = args.devices.split(",") if args.devices else group.devices
    spec = EngineSpec(
        model=group.model,
        role=Role(args.role or group.role),
        devices=tuple(devices),
        has_tiers=are_wanted(group.tiers),
    )
    options = WorkerOptions(stuck_after_s=group.stuck_after_s, taints=(*group.taints, *args.taint))

    async def fleet(process: Process) -> None:
        from kvolt.cli.worker.fleet import WorkerFleet

        workers = WorkerFleet(process, lambda: build_engine(engine_name, spec, arguments), options, count)
        try:
            await workers.start()
            await workers.run()
        finally:
            await workers.close()

    async def body(process: Process) -> None:
        follower = build_follower(engine_name, spec, arguments)
        if follower is not None:
            await follower.run()
            return
        runtime = process.runtime
        transfers = Transfers(runtime, process.settings.transfer)
        engine = build_engine(engine_name, spec, arguments)
        new_tiering = tiering_of(group.tiers, transfers.agent)
        worker = Worker(runtime, engine, loaded.settings.namespace, options, transfers.mover, new_tiering)
        transfers.tell(worker.tell_links)
        try:
            await worker.start()
            process.metrics.registry.register(worker.metrics)
            process.metrics.registry.register(HandoffMetrics(lambda: stats_of([worker])))
            process.metrics.registry.register(
                PathMetrics(lambda: transfers.paths, lambda: transfers.started_agent)
            )
            process.metrics.registry.register(TierMetrics(lambda: [worker.tiering] if worker.tiering else []))
            runtime.commands["clear_kv_blocks"] = lambda body: worker.clear_kv_blocks()
            runtime.commands["resize_kv_tiers"] = lambda body: resize_tiers(worker.tiering, body)
            await worker.run()
        finally:
            await transfers.close()  # before the memory that it moves
            await worker.close()

    return run_process(loaded.settings, args.name or group.name, body if count == 1 else fleet)


def _check_count(engine_name: str, count: int) -> None:
    """ConfigError unless an engine of this kind can be so many times in one process."""
    if not 1 <= count <= MAX_PER_PROCESS:
        raise ConfigError(
            f"{count} workers in one process", key="workers", remedy=f"give 1 to {MAX_PER_PROCESS}"
        )
    if count > 1 and not find_engine(engine_name).many_per_process:
        raise ConfigError(
            f"the {engine_name} engine needs a process for each worker",
            key="workers",
            remedy="leave out --workers and per_process; `kvolt serve --workers N` starts processes",
        )


def check_engine(group: WorkerSettings) -> tuple[str, dict[str, Any]]:
    """The group's engine and all its arguments; ConfigError when they do not go together."""
    name, chosen = choose_engine(group.engine, group.model)
    arguments = {**chosen, **group.args}
    check_arguments(name, arguments)
    _check_count(name, group.per_process)
    if name == "native":
        _check_name(group.model)
    return name, arguments


def _check_name(model: str) -> None:
    """ConfigError for what can be no model's name, before anybody has waited for torch; a hub's is left to it."""
    from kvolt.models.model_files import parse_hub_name
    from kvolt.models.resolve import locate

    if parse_hub_name(model) is None:
        locate(model)


def with_model(group: WorkerSettings, model: str, engine: str | None = None) -> WorkerSettings:
    """The same group with another model: what was said of the engine and its arguments was for the old one."""
    if engine is None:
        engine = group.engine if model == group.model else AUTO
    same = model == group.model and engine in (group.engine, choose_engine(group.engine, model)[0])
    return msgspec.structs.replace(group, model=model, engine=engine, args=group.args if same else {})


def with_arguments(
    group: WorkerSettings, arguments: Sequence[str], loras: Sequence[str] = ()
) -> WorkerSettings:
    """The same group with the arguments of `--arg` and the adapters of `--lora`."""
    given = merge_arguments(group.args, arguments)
    return _with_loras(msgspec.structs.replace(group, args=given), loras)


def _with_loras(group: WorkerSettings, given: Sequence[str]) -> WorkerSettings:
    """The same group with the adapters of `--lora`, besides those that its `args.loras` has."""
    if not given:
        return group
    loras: dict[str, str] = {}
    for text in given:
        name, folder = _parse_lora(text)
        if name in loras:
            raise ConfigError(f"--lora gives {name!r} twice", key="lora", remedy="one name for each adapter")
        loras[name] = folder
    known = group.args.get("loras")
    merged = {**known, **loras} if isinstance(known, dict) else loras
    return msgspec.structs.replace(group, args={**group.args, "loras": merged})


def _parse_lora(text: str) -> tuple[str, str]:
    """Name and absolute folder. ConfigError for what is no adapter, before anybody has waited for torch."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(
            f"--lora {text!r} is not NAME=FOLDER",
            key="lora",
            remedy="write for example --lora sql=./adapters/sql",
        )
    path = Path(folder).expanduser().absolute()
    if not (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"--lora {name}: {path} has no adapter_config.json",
            key="lora",
            remedy="name a folder with adapter_config.json and adapter_model.safetensors",
        )
    return name, str(path)


def find_group(groups: list[WorkerSettings], name: str | None) -> WorkerSettings:
    if not groups:
        raise ConfigError(
            "the config has no [[workers]]", key="workers", remedy="add one, or drop the empty list"
        )
    if name is None:
        return groups[0]
    for group in groups:
        if group.name == name:
            return group
    known = ", ".join(group.name for group in groups)
    raise ConfigError(f"no [[workers]] entry is named {name!r}", key="workers", remedy=f"known: {known}")
