"""`kvolt frontend`: the HTTP edge."""

from __future__ import annotations

import argparse
import asyncio
import logging

from kvolt.cli.process import Process, run_process
from kvolt.frontend.app import FrontendApp
from kvolt.frontend.models import Models
from kvolt.runtime.address import EndpointAddress
from kvolt.runtime.config import LoadedConfig
from kvolt.runtime.http import HttpLimits, HttpServer
from kvolt.runtime.network import join_address
from kvolt.runtime.settings import Settings

HELP = """
Start the OpenAI-compatible HTTP edge. It finds workers through discovery and serves their models.

Examples:
  kvolt frontend                                  on 127.0.0.1:8000, workers of this machine
  kvolt frontend --host 0.0.0.0 --port 80
  kvolt frontend --discovery-join-listen 10.0.0.5:7400
                                                  workers elsewhere join with --join 10.0.0.5:7400
"""

log = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="frontend", help="name of this process in logs and status")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    settings = loaded.settings

    async def body(process: Process) -> None:
        await serve_http(process, settings)

    return run_process(settings, args.name, body)


async def serve_http(process: Process, settings: Settings) -> None:
    """Serve until the process is stopped; running requests finish first."""
    runtime = process.runtime
    models = Models(runtime, settings.namespace)
    app = FrontendApp(runtime, models, settings.frontend.request_timeout_s)
    server = HttpServer(
        runtime.ports.network,
        app.routes(),
        runtime.ports.clock,
        HttpLimits(max_body_bytes=settings.frontend.max_body_bytes),
        observe=process.metrics.http_observer("frontend"),
    )

    async def stop(drain_s: float) -> None:
        await server.close(drain_s)
        await models.close()

    process.before_close(stop)
    address = await server.start(join_address(settings.frontend.host, settings.frontend.port))
    models.start()
    await runtime.serve_streams(
        EndpointAddress(settings.namespace, "frontend", "http"),
        lambda stream: stream.end(),
        info={"http": address},
    )
    log.info("listening on http://%s", address)
    await asyncio.get_running_loop().create_future()
