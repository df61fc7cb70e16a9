"""`kvolt worker`: serve one engine behind an endpoint, or many simulated engines in one process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvolt.cli.flags import option, optional, repeated
from kvolt.cli.process import Process, run_process
from kvolt.cli.worker.served_model import add_model_flags, served_model, with_served_model
from kvolt.cli.worker.tier_settings import add_tier_flags, are_wanted, with_tiers
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.registry import (
    AUTO,
    build_engine,
    build_headless_node,
    check_arguments,
    choose_engine,
    find_engine,
    merge_arguments,
)
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.config.settings import MAX_PER_PROCESS, WorkerSettings
from kvolt.runtime.security.identity import ProcessRole

HELP = """
Start one worker. It registers through discovery and serves until it is stopped; Ctrl-C drains it.

Examples:
  kvolt worker                                  the first [[workers]] entry of the config
  kvolt worker Qwen/Qwen3-0.6B                  a Hugging Face name, a folder or a GGUF file
  kvolt worker --join 10.0.0.5:7400             register with a frontend on another machine
  kvolt worker --group decode                   the [[workers]] entry named "decode"
  kvolt worker --arg dtype=float32              set an engine argument (`kvolt engine list native`)
  kvolt worker --taint gpu=h100 --taint eu      labels that requests can require or prefer
  kvolt worker --kv-host 8GiB --kv-disk 100GiB  offload KV to host memory and disk
  kvolt worker sleep|wake --help                release the device memory of a running worker, and take it back
  kvolt worker sim-tiny --workers 300           300 simulated workers in one process
"""


def configure(parser: argparse.ArgumentParser) -> None:
    optional(parser, "model", "MODEL", "Hugging Face name, folder or GGUF file. Default: from the config.")
    add_engine_flags(parser)
    worker = parser.add_argument_group("worker")
    option(worker, "--group", "NAME", "Name of the [[workers]] entry to run. Default: the first.")
    option(
        worker,
        "--name",
        None,
        "Name in logs and status. Default: that of the entry.",
    )
    option(
        worker,
        "--role",
        None,
        "Role of the worker. Default: from the config, else aggregated.",
        choices=[role.value for role in Role],
    )
    option(worker, "--devices", "A,B", "GPUs, by index or UUID. Default: from the config, else all.")
    option(
        worker,
        "--workers",
        "N",
        "Workers in this process (sim engine only). Default: 1.",
        int,
    )
    worker.add_argument(
        "--taint",
        action="append",
        default=[],
        metavar="NAME",
        help="Label that requests can require or prefer, such as gpu=h100; repeatable.",
    )
    option(
        worker,
        "--lora-state",
        "FILE",
        "File that keeps adapters loaded at run time for a restart; `kvolt serve` has its own.",
    )
    add_tier_flags(parser)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    option(
        engine,
        "--engine",
        "NAME",
        "native, sim, vllm, sglang, trtllm, remote or FILE.py:NAME. Default: sim for sim-*, else native.",
    )
    repeated(engine, "--arg", "KEY=VALUE", "Engine argument (`kvolt engine list`)")
    repeated(engine, "--lora", "NAME=FOLDER", "LoRA adapter (PEFT), served as NAME")
    add_model_flags(engine)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    # Here, as `kvolt serve` imports this module for its flags and checks.
    from kvolt.cli.worker.tiers import resize_tiers, tiering_of
    from kvolt.cli.worker.transfers import Transfers
    from kvolt.kv.tiers.metrics import TierMetrics
    from kvolt.worker.kv.transfer_metrics import HandoffMetrics, PathMetrics
    from kvolt.worker.worker import Worker, WorkerOptions, stats_of

    group = find_group(loaded.settings.workers, args.group)
    if args.model is not None or args.engine is not None:
        group = with_model(group, args.model or group.model, args.engine)
    count = group.per_process if args.workers is None else args.workers
    group = with_tiers(msgspec.structs.replace(group, per_process=count), args)
    group = with_served_model(group, args.served_model_name, args.generation_config)
    if count > 1 and are_wanted(group.tiers):
        raise ConfigError(
            f"KV tiers are not supported with {count} workers in one process",
            key="tiers",
            remedy="start one process per worker",
        )
    engine_name, arguments = check_engine(with_arguments(group, args.arg, args.lora))
    devices = args.devices.split(",") if args.devices else group.devices
    spec = EngineSpec(
        model=group.model,
        role=Role(args.role or group.role),
        devices=tuple(devices),
        has_tiers=are_wanted(group.tiers),
    )
    options = WorkerOptions(
        stuck_after_s=group.stuck_after_s,
        taints=(*group.taints, *args.taint),
        lora_state=Path(args.lora_state) if args.lora_state else None,
        served=served_model(group),
    )

    async def fleet(process: Process) -> None:
        from kvolt.cli.worker.fleet import WorkerFleet

        workers = WorkerFleet(process, lambda: build_engine(engine_name, spec, arguments), options, count)
        try:
            await workers.start()
            await workers.run()
        finally:
            await workers.close()

    async def body(process: Process) -> None:
        headless_node = build_headless_node(engine_name, spec, arguments)
        if headless_node is not None:
            await headless_node.run()
            return
        runtime = process.runtime
        transfers = Transfers(runtime, process.settings.transfer)
        engine = build_engine(engine_name, spec, arguments)
        create_tiering = tiering_of(group.tiers, transfers.agent, runtime.ports.credentials)
        worker = Worker(runtime, engine, loaded.settings.namespace, options, transfers.mover, create_tiering)
        transfers.add_listener(worker.register_links)
        try:
            await worker.start()
            process.metrics.registry.register(worker.metrics)
            process.metrics.registry.register(HandoffMetrics(lambda: stats_of([worker])))
            process.metrics.registry.register(
                PathMetrics(lambda: transfers.paths, lambda: transfers.started_agent)
            )
            process.metrics.registry.register(
                TierMetrics(lambda: [worker.tiering.report()] if worker.tiering else [])
            )
            runtime.commands["clear_kv_blocks"] = lambda body: worker.operations.clear_kv_blocks()
            runtime.commands["resize_kv_tiers"] = lambda body: resize_tiers(worker.tiering, body)
            await worker.run()
        finally:
            await transfers.close()  # before the memory that it uses
            await worker.close()

    return run_process(
        loaded.settings, args.name or group.name, body if count == 1 else fleet, ProcessRole.WORKER
    )


def _check_count(engine_name: str, count: int) -> None:
    """Raise ConfigError if the engine does not support this number of workers in one process."""
    if not 1 <= count <= MAX_PER_PROCESS:
        raise ConfigError(
            f"{count} workers in one process", key="workers", remedy=f"must be 1 to {MAX_PER_PROCESS}"
        )
    if count > 1 and not find_engine(engine_name).many_per_process:
        raise ConfigError(
            f"the {engine_name} engine supports one worker per process",
            key="workers",
            remedy="omit --workers and per_process; `kvolt serve --workers N` starts N processes",
        )


def check_engine(group: WorkerSettings) -> tuple[str, dict[str, Any]]:
    """Engine name and arguments of the group. Raises ConfigError if they are invalid."""
    name, implied = choose_engine(group.engine, group.model)
    arguments = {**implied, **group.args}
    check_arguments(name, arguments)
    _check_count(name, group.per_process)
    if name == "native":
        from kvolt.models.resolve import check_name

        check_name(group.model)
    return name, arguments


def with_model(group: WorkerSettings, model: str, engine: str | None = None) -> WorkerSettings:
    """The group with another model. What was set for the old model is dropped unless it still applies."""
    if engine is None:
        engine = group.engine if model == group.model else AUTO
    same = model == group.model and engine in (group.engine, choose_engine(group.engine, model)[0])
    if model != group.model:
        group = msgspec.structs.replace(group, served_names=[], generation_config="auto")
    return msgspec.structs.replace(group, model=model, engine=engine, args=group.args if same else {})


def with_arguments(
    group: WorkerSettings, arguments: Sequence[str], loras: Sequence[str] = ()
) -> WorkerSettings:
    """The group with the arguments of `--arg` and the adapters of `--lora`."""
    merged = merge_arguments(group.args, arguments)
    return _with_loras(msgspec.structs.replace(group, args=merged), loras)


def _with_loras(group: WorkerSettings, assignments: Sequence[str]) -> WorkerSettings:
    """The group with the adapters of `--lora` added to its `args.loras`."""
    if not assignments:
        return group
    loras: dict[str, str] = {}
    for text in assignments:
        name, folder = _parse_lora(text)
        if name in loras:
            raise ConfigError(
                f"--lora {name!r} is repeated", key="lora", remedy="use a different name for each adapter"
            )
        loras[name] = folder
    known = group.args.get("loras")
    merged = {**known, **loras} if isinstance(known, dict) else loras
    return msgspec.structs.replace(group, args={**group.args, "loras": merged})


def _parse_lora(text: str) -> tuple[str, str]:
    """Name and absolute path of an adapter. Raises ConfigError for an invalid one before torch is imported."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(
            f"--lora {text!r}: expected NAME=FOLDER",
            key="lora",
            remedy="for example --lora sql=./adapters/sql",
        )
    path = Path(folder).expanduser().absolute()
    if not (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"--lora {name}: {path} has no adapter_config.json",
            key="lora",
            remedy="choose a directory with adapter_config.json and adapter_model.safetensors",
        )
    return name, str(path)


def find_group(groups: list[WorkerSettings], name: str | None) -> WorkerSettings:
    if not groups:
        raise ConfigError(
            "the config has no [[workers]]", key="workers", remedy="add one, or remove the empty list"
        )
    if name is None:
        return groups[0]
    for group in groups:
        if group.name == name:
            return group
    known = ", ".join(group.name for group in groups)
    raise ConfigError(f"no [[workers]] entry is named {name!r}", key="workers", remedy=f"known: {known}")
