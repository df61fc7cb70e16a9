"""`kvolt worker`: one engine behind an endpoint."""

from __future__ import annotations

import argparse
import json

from kvolt.cli.process import Process, run_process
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.registry import EngineSpec, build_engine, check_arguments
from kvolt.engines.worker import Worker
from kvolt.runtime.config import LoadedConfig
from kvolt.runtime.settings import WorkerSettings

HELP = """
Start one worker. It registers through discovery and serves until it is stopped (Ctrl-C drains it).

Examples:
  kvolt worker                                  the first [[workers]] entry of the config
  kvolt worker sim-tiny --join 10.0.0.5:7400    join a frontend on another machine
  kvolt worker --group decode                   the [[workers]] entry named decode
  kvolt worker --arg speed=10                   an argument of the engine
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="model to serve (default: as the config says)")
    parser.add_argument("--group", help="name of the [[workers]] entry to run (default: the first)")
    parser.add_argument("--name", help="name of this process in logs and status (default: the group's)")
    parser.add_argument("--engine", help="what computes (default: as the config says)")
    parser.add_argument("--role", choices=[role.value for role in Role], help="what this worker does")
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="engine argument; VALUE is JSON or a word",
    )


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    group = find_group(loaded.settings.workers, args.group)
    engine_name = args.engine or group.engine
    arguments = {**group.args, **dict(_parse_argument(text) for text in args.arg)}
    check_arguments(engine_name, arguments)
    spec = EngineSpec(
        model=args.model or group.model, role=Role(args.role or group.role), devices=tuple(group.devices)
    )

    async def body(process: Process) -> None:
        worker = Worker(
            process.runtime, build_engine(engine_name, spec, arguments), loaded.settings.namespace
        )
        await worker.start()
        try:
            await worker.run()
        finally:
            await worker.close()

    return run_process(loaded.settings, args.name or group.name, body)


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


def _parse_argument(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"--arg {text!r} is not KEY=VALUE", key="arg", remedy="write for example --arg speed=10"
        )
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
