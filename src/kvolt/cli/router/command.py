"""`kvolt router`: the one process that decides for all frontends of a namespace."""

from __future__ import annotations

import argparse
import asyncio
import logging

from kvolt.cli.process import Process, run_process
from kvolt.cli.router.http import router_http
from kvolt.router.kv_metrics import KvCollector
from kvolt.router.policy.registry import POLICIES
from kvolt.router.registry import ROUTERS, find_router
from kvolt.router.service.metrics import RouterCollector
from kvolt.router.service.service import RouterService
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.network import join_address

HELP = """
Start the router as a process of its own. It decides which worker gets a request, for all frontend
processes of its namespace that share a port: what one of them has sent counts for all.

You rarely need it: `kvolt serve --processes N` and `kvolt frontend --processes N` start one and keep it
alive. While none runs, every frontend process decides by itself, and no request waits for one. A second
one of the same namespace stands by and is asked when the first is gone.

Examples:
  kvolt router                                  for the frontends of this machine
  kvolt router --router latency                 by the KV that workers hold and what they are busy with
  kvolt router --namespace blue
  kvolt router --join 10.0.0.5:7400             for frontends that share discovery with that machine
  kvolt router --http-port 8100                 and for other stacks: docs/router.md tells what it answers
"""

log = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="router", help="name of this process in logs and status")
    parser.add_argument(
        "--router",
        metavar="NAME",
        help=f"how it decides: {', '.join(ROUTERS)} or FILE.py:FUNCTION (default: the setting frontend.router)",
    )
    parser.add_argument(
        "--http-port",
        type=int,
        metavar="N",
        help="also serve it over HTTP on this port, for stacks that are not kvolt's (0: any free one)",
    )
    parser.add_argument(
        "--http-host", default="127.0.0.1", metavar="HOST", help="address of that port (default: 127.0.0.1)"
    )


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    settings = loaded.settings
    name = args.router or settings.frontend.router
    new_router = find_router(name, settings.router)

    async def body(process: Process) -> None:
        service = RouterService(process.runtime, settings.namespace, new_router, settings.router)
        process.metrics.registry.register(RouterCollector(service))
        process.metrics.registry.register(KvCollector(service.routers, settings.frontend.metrics_prefix))
        process.before_close(lambda drain_s: service.close())
        await service.start()
        if args.http_port is not None:
            # Posted blocks are of use only to who decides by them.
            http = router_http(process, name if name not in ROUTERS or name in POLICIES else "latency")
            address = await http.start(join_address(args.http_host, args.http_port))
            log.info("listening on http://%s", address)
        await asyncio.get_running_loop().create_future()

    return run_process(settings, args.name, body)
