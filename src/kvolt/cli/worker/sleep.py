"""`kvolt worker sleep`: release the device memory of running workers."""

from __future__ import annotations

import argparse
import sys

from kvolt.api.cluster import Cluster, ProcessView, find_process, visit
from kvolt.cli.flags import CLIENT_GROUPS, option
from kvolt.cli.process import run_loop
from kvolt.core.errors import ConfigError, KvoltError
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.process_control import MAX_CONTROL_S

HELP = """
Put the engines of workers to sleep: requests finish, then the engine moves its weights to host memory and drops its
KV blocks, so that another process can use the GPU. `kvolt worker wake` undoes it. vLLM can sleep, on a GPU with
--arg engine_args.enable_sleep_mode=true, and the simulated engine.

Examples:
  kvolt worker sleep worker-0       names or addresses as `kvolt status` shows them
  kvolt worker sleep                all workers
"""

SETTINGS = CLIENT_GROUPS


def configure(parser: argparse.ArgumentParser) -> None:
    add_names(parser)
    option(parser, "--timeout", "SECONDS", "Time that running requests get to finish.", float, default=30.0)


def add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="Names or addresses of workers. Default: all."
    )


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    if not 0 <= args.timeout <= MAX_CONTROL_S:
        message = f"--timeout must be 0 to {MAX_CONTROL_S:g}"
        raise ConfigError(message, key="timeout", remedy="give it in seconds")
    return control_workers(args.names, loaded, "sleep", args.timeout, "asleep")


def control_workers(names: list[str], loaded: LoadedConfig, verb: str, timeout_s: float, outcome: str) -> int:
    """Send a verb to workers one after the other and print each outcome; 1 if one of them failed."""

    async def control(cluster: Cluster, view: ProcessView) -> bool:
        try:
            await cluster.control(view.address, verb, timeout_s)
        except KvoltError as error:
            print(f"{view.name}: {error.message}", file=sys.stderr)
            return False
        print(f"{view.name}: {outcome}")
        return True

    async def main() -> int:
        async with visit(loaded.settings) as cluster:
            workers = find_workers(await cluster.list_processes(), names)
            done = [await control(cluster, view) for view in workers]
        return 0 if all(done) else 1

    return run_loop(main)


def find_workers(views: list[ProcessView], names: list[str]) -> list[ProcessView]:
    """The workers with these names or addresses, by default all.

    ConfigError if there are none, or for a process that is no running worker; NotFound as `find_process`.
    """
    workers = [view for view in views if view.status is not None and "engine" in view.status.details]
    if not workers:
        raise ConfigError("no worker is running", key="worker", remedy="see `kvolt status`")
    named = [find_process(views, name) for name in names]
    for view in named:
        if view not in workers:
            known = ", ".join(dict.fromkeys(worker.name for worker in workers))
            raise ConfigError(
                f"{view.name} is no running worker",
                key="worker",
                remedy=f"running: {known}; see `kvolt status`",
            )
    return list({view.address: view for view in named}.values()) or workers
