"""`kvolt router`: the one process that decides for all frontends of a namespace."""

from __future__ import annotations

import argparse
import asyncio

from kvolt.cli.process import Process, run_process
from kvolt.router.metrics import RouterCollector
from kvolt.router.service import RouterService
from kvolt.runtime.config import LoadedConfig

HELP = """
Start the router as a process of its own. It decides which worker gets a request, for all frontend
processes of its namespace that share a port: so they take turns over the workers as one.

You rarely need it: `kvolt serve --processes N` and `kvolt frontend --processes N` start one and keep it
alive. While none runs, every frontend process goes round the workers by itself, and no request waits.
A second one of the same namespace stands by and is asked when the first is gone.

Examples:
  kvolt router                                  for the frontends of this machine
  kvolt router --namespace blue
  kvolt router --join 10.0.0.5:7400             for frontends that share discovery with that machine
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="router", help="name of this process in logs and status")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    async def body(process: Process) -> None:
        service = RouterService(process.runtime, loaded.settings.namespace)
        process.metrics.registry.register(RouterCollector(service))
        await service.start()
        await asyncio.get_running_loop().create_future()

    return run_process(loaded.settings, args.name, body)
