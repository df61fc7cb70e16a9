"""`kvolt frontend`: the HTTP edge."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

import msgspec

from kvolt.cli.edge_member import Member, Membership
from kvolt.cli.process import Process, run_process
from kvolt.frontend.admission import Admission, WorkerLoads
from kvolt.frontend.clear_kv import clear_kv_blocks
from kvolt.frontend.edge import edge_server
from kvolt.frontend.generate import GenerateOptions
from kvolt.frontend.lora_admin import load_adapter, unload_adapter
from kvolt.frontend.models import ModelOptions, Models
from kvolt.frontend.preprocess import ParserNames, check_parsers
from kvolt.frontend.trace_recorder import TraceRecorder
from kvolt.router.policies import ROUTERS, NewRouter
from kvolt.runtime.address import EndpointAddress
from kvolt.runtime.config import LoadedConfig
from kvolt.runtime.http import HttpLimits
from kvolt.runtime.memory import return_freed_memory, settle_garbage_collector
from kvolt.runtime.network import SocketNetwork, join_address
from kvolt.runtime.settings import Settings
from kvolt.runtime.tasks import Crew

HELP = """
Start the OpenAI-compatible HTTP edge. It finds workers through discovery and serves their models.

Examples:
  kvolt frontend                                  on 127.0.0.1:8000, workers of this machine
  kvolt frontend --host 0.0.0.0 --port 80
  kvolt frontend --router least-loaded            to who has the fewest requests under way
  kvolt frontend --processes 4                    four processes on one port, with a router, kept alive
  kvolt frontend --discovery-join-listen 10.0.0.5:7400
                                                  workers elsewhere join with --join 10.0.0.5:7400
"""

log = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name",
        default="frontend",
        help="name of this process in logs and status (several are frontend-0, frontend-1 ...)",
    )
    # What a supervisor tells each of several processes; of no use to a person.
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--slot", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--counts", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    settings = loaded.settings
    member = Member(args.group, args.slot, args.counts) if args.group and args.counts else None
    if settings.frontend.processes > 1 and member is None:
        # Not at the top: what supervises is not to be in the memory of every HTTP process.
        from kvolt.cli.serve import serve

        return serve(msgspec.structs.replace(settings, workers=[]))

    return_freed_memory()

    async def body(process: Process) -> None:
        await serve_http(process, settings, member)

    return run_process(settings, args.name, body)


def _new_router(settings: Settings, part: Membership | None) -> NewRouter:
    """Turns are taken in common with our siblings; what is under way each process counts for itself."""
    wanted = settings.frontend.router
    return part.new_router if part is not None and wanted == "round-robin" else ROUTERS[wanted]


async def serve_http(process: Process, settings: Settings, member: Member | None = None) -> None:
    """Serve until the process is stopped; running requests finish first."""
    runtime = process.runtime
    wanted = settings.frontend
    parsers = ParserNames(wanted.tool_parser, wanted.reasoning_parser)
    check_parsers(parsers)
    part = await Membership.join(process, member) if member is not None else None
    namespaces = [name.strip() for name in (wanted.namespaces or settings.namespace).split(",")]
    models = Models(
        runtime,
        [name for name in namespaces if name],
        ModelOptions(wanted.token_cache_bytes, parsers, wanted.max_attempts),
        _new_router(settings, part),
    )
    loads = WorkerLoads()
    admission = Admission(loads, wanted.max_requests, part.slot if part is not None else None)
    recorder = TraceRecorder(runtime.ports.clock.monotonic)
    server = edge_server(
        runtime,
        models,
        admission,
        process.metrics,
        GenerateOptions(
            strict_fields=wanted.strict_fields,
            hold_headers_s=wanted.hold_headers_s,
            request_timeout_s=wanted.request_timeout_s,
        ),
        metrics_prefix=wanted.metrics_prefix,
        limits=HttpLimits(
            max_body_bytes=wanted.max_body_bytes,
            header_timeout_s=wanted.header_timeout_s,
            body_timeout_s=wanted.body_timeout_s,
            write_timeout_s=wanted.write_timeout_s,
        ),
        network=None if part is None else SocketNetwork(reuse_port=True),
        siblings=None if part is None else part.siblings(admission),
        recorder=recorder,
    )
    crew = Crew("frontend")
    crew.start(loads.follow(runtime.events), "loads")

    async def stop(drain_s: float) -> None:
        await server.close(drain_s)
        recorder.close()
        if part is not None:
            await part.close()
        await crew.close()
        await models.close()

    process.before_close(stop)
    runtime.commands = {
        "clear_kv_blocks": lambda body: clear_kv_blocks(runtime, models),
        "load_lora_adapter": lambda body: load_adapter(runtime, models, body),
        "unload_lora_adapter": lambda body: unload_adapter(runtime, models, body),
    }
    recorder.add_to(runtime.server)
    models.start()
    if part is not None:
        await part.settle(models)
    address = await server.start(join_address(wanted.host, wanted.port))
    await runtime.serve_streams(
        EndpointAddress(settings.namespace, "frontend", "http"),
        lambda stream: stream.end(),
        info={"http": address},
    )
    settle_garbage_collector()
    log.info("listening on http://%s", address)
    await asyncio.get_running_loop().create_future()
