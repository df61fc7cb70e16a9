"""`kvolt router`: a router process shared by the frontends of a namespace."""

from __future__ import annotations

import argparse
import asyncio
import logging

from kvolt.cli.flags import option
from kvolt.cli.process import Process, run_process
from kvolt.cli.router.http import router_http
from kvolt.router.metrics import KvCollector
from kvolt.router.policy.registry import POLICIES
from kvolt.router.registry import ROUTERS, find_router
from kvolt.router.service.metrics import RouterCollector
from kvolt.router.service.service import RouterService
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.network import is_loopback, join_address
from kvolt.runtime.security.exposure import check_exposure, has_credentials
from kvolt.runtime.security.identity import ProcessRole

HELP = """
Start a router process. It routes requests for all frontend processes of its namespace that use it, so
that every routing decision accounts for the load of all of them.

`kvolt serve --processes N` and `kvolt frontend --processes N` start a router by themselves. Frontends
route on their own while no router is running. A second router of a namespace is a standby.

Examples:
  kvolt router                                  for the frontends of this machine
  kvolt router --router classic
  kvolt router --join 10.0.0.5:7400             register with a join server
  kvolt router --http-port 8100                 also serve routing decisions over HTTP (docs/router.md)
  kvolt router explain --help                   show why a prompt goes to a worker
"""

log = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    option(parser, "--name", None, "Name of this process in logs and status.", default="router")
    option(
        parser,
        "--http-port",
        "N",
        "Serve routing decisions over HTTP on this port, for other serving stacks. 0 picks a free port. "
        "Default: no HTTP.",
        int,
    )
    option(parser, "--http-host", "HOST", "Listen address for --http-port.", default="127.0.0.1")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    settings = loaded.settings
    name = settings.frontend.router
    new_router = find_router(name, settings.router)
    if args.http_port is not None:
        check_exposure(settings.cluster, args.http_host, "--http-host", "the router's HTTP API")

    async def body(process: Process) -> None:
        service = RouterService(process.runtime, settings.namespace, new_router, settings.router)
        process.metrics.registry.register(RouterCollector(service))
        process.metrics.registry.register(KvCollector(service.routers))
        process.before_close(lambda drain_s: service.close())
        await service.start()
        if args.http_port is not None:
            # Blocks posted over HTTP require a KV-aware policy.
            http = router_http(
                process, args.http_host, name if name not in ROUTERS or name in POLICIES else "latency"
            )
            address = await http.start(join_address(args.http_host, args.http_port))
            scheme = (
                "http" if is_loopback(args.http_host) or not has_credentials(settings.cluster) else "https"
            )
            log.info("listening on %s://%s", scheme, address)
        await asyncio.get_running_loop().create_future()

    return run_process(settings, args.name, body, ProcessRole.ROUTER)
