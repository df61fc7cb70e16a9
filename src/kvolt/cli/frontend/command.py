"""`kvolt frontend`: the HTTP edge."""

from __future__ import annotations

import argparse
import asyncio
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from kvolt.cli.frontend.attach_flags import add_attach_flags
from kvolt.cli.frontend.edge_member import SETTLE_S, Member, Membership
from kvolt.cli.process import Process, run_process
from kvolt.frontend.admin.clear_kv import clear_kv_blocks
from kvolt.frontend.admin.explain import RouteExplainer
from kvolt.frontend.admin.lora_admin import load_adapter, unload_adapter
from kvolt.frontend.admin.trace_recorder import TraceRecorder
from kvolt.frontend.admission import Admission, WorkerLoads
from kvolt.frontend.edge import edge_server
from kvolt.frontend.generate import GenerateOptions
from kvolt.frontend.models import ModelOptions, Models
from kvolt.frontend.processors.registry import find_processor
from kvolt.frontend.tokenization.preprocess import ParserNames
from kvolt.journey.prefill_mode import WayRule
from kvolt.router.port import Router, RouterContext
from kvolt.router.registry import NewRouter, find_router
from kvolt.router.service.client import RouterLink
from kvolt.router.service.metrics import LinkCollector
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.config.settings import FrontendSettings, Settings
from kvolt.runtime.endpoint.address import EndpointAddress
from kvolt.runtime.host.memory import return_freed_memory, settle_garbage_collector
from kvolt.runtime.http.server import HttpLimits
from kvolt.runtime.network import SocketNetwork, join_address
from kvolt.runtime.tasks import Crew, Scope

HELP = """
Start the OpenAI-compatible HTTP edge. It finds workers through discovery and serves their models.

Examples:
  kvolt frontend                                  on 127.0.0.1:8000, workers of this machine
  kvolt frontend --host 0.0.0.0 --port 80
  kvolt frontend --router least-loaded            to who has the fewest requests under way
  kvolt frontend --router policy.py:cost          by a function of your own (docs/router.md)
  kvolt frontend --processes 4                    four processes on one port, with a router, kept alive
  kvolt frontend --router latency --router-process
                                                  as a `kvolt router` decides, and alone while there is none
  kvolt frontend --attach http://10.0.0.7:8000,events=tcp://10.0.0.7:5557
                                                  in front of a vLLM or SGLang server that runs already
  kvolt frontend --processor vllm --tool-parser kimi_k2 --reasoning-parser kimi_k2
                                                  prompts and answers by vLLM's own code (docs/engines.md)
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
    add_attach_flags(parser)
    # What a supervisor tells each of several processes; of no use to a person.
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--slot", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--counts", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    settings = loaded.settings
    member = Member(args.group, args.slot, args.counts) if args.group and args.counts else None
    if args.attach:
        _check_processor(settings.frontend)
        return _run_attached(args, settings)
    if settings.frontend.processes > 1 and member is None:
        # Not at the top: what supervises is not to be in the memory of every HTTP process.
        from kvolt.cli.serve.command import serve

        return serve(msgspec.structs.replace(settings, workers=[]))

    _check_processor(settings.frontend)
    return_freed_memory()

    async def body(process: Process) -> None:
        await serve_http(process, settings, member)

    return run_process(settings, args.name, body)


def _run_attached(args: argparse.Namespace, settings: Settings) -> int:
    """With servers of others as workers in the same process."""
    from kvolt.cli.frontend.attach import Attached, parse_attached

    attached = parse_attached(args.attach, settings)
    return_freed_memory()

    async def body(process: Process) -> None:
        async with Scope("frontend") as scope:
            scope.start(serve_http(process, settings), "http")
            scope.start(Attached(process, attached).run(), "attached")

    return run_process(settings, args.name, body)


def _new_router(settings: Settings, link: RouterLink | None) -> NewRouter:
    """Decided here, or by the router process, so that what one frontend has sent counts for all. While that is away
    each decides by what it has sent itself."""
    wanted = find_router(settings.frontend.router, settings.router)
    return wanted if link is None else link.new_router(partial(_without_events, wanted))


def _without_events(new_router: NewRouter, context: RouterContext) -> Router:
    """An index in each of several processes would be an index too many: it stands in for another for a while."""
    settings = msgspec.structs.replace(context.settings, events=False)
    return new_router(replace(context, settings=settings))


def _parsers(wanted: FrontendSettings) -> ParserNames:
    return ParserNames(wanted.tool_parser, wanted.reasoning_parser)


def _check_processor(wanted: FrontendSettings) -> None:
    """Before there is a loop: loading what somebody else's code needs takes seconds in which nobody is answered."""
    find_processor(wanted.processor).check(_parsers(wanted))


def way_rule(wanted: FrontendSettings) -> WayRule:
    return WayRule(
        is_predicted=wanted.prefill_choice == "predicted",
        min_tokens=wanted.prefill_min_tokens,
        max_queue_s=wanted.prefill_max_queue_s,
        ttft_s=wanted.target_ttft_s,
        itl_s=wanted.target_itl_s,
    )


async def serve_http(process: Process, settings: Settings, member: Member | None = None) -> None:
    """Serve until the process is stopped; running requests finish first."""
    runtime = process.runtime
    wanted = settings.frontend
    link = None
    if member is not None or settings.router.process:
        link = await RouterLink.to(runtime, settings.namespace)
        process.metrics.registry.register(LinkCollector(link))
    part = Membership(process, member, link) if member is not None and link is not None else None
    namespaces = [name.strip() for name in (wanted.namespaces or settings.namespace).split(",")]
    models = Models(
        runtime,
        [name for name in namespaces if name],
        ModelOptions(
            wanted.token_cache_bytes,
            _parsers(wanted),
            wanted.max_attempts,
            settings.router,
            wanted.migration_limit,
            way_rule(wanted),
            tuple(name.strip() for name in wanted.decode_first.split(",") if name.strip()),
            find_processor(wanted.processor).build,
        ),
        _new_router(settings, link),
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
            max_priority=settings.router.max_priority,
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
        if link is not None:
            await link.close()

    process.before_close(stop)
    runtime.commands = {
        "clear_kv_blocks": lambda body: clear_kv_blocks(runtime, models),
        "load_lora_adapter": lambda body: load_adapter(runtime, models, body),
        "unload_lora_adapter": lambda body: unload_adapter(runtime, models, body),
    }
    recorder.add_to(runtime.server)
    explainer = RouteExplainer(models, runtime.options.name)
    explainer.add_to(runtime.server)
    runtime.commands["explain_route"] = explainer.explain
    models.start()
    # An open port answers from what discovery knows.
    await (models.settle(SETTLE_S) if part is None else part.settle(models))
    address = await server.start(join_address(wanted.host, wanted.port))
    await runtime.serve_streams(
        EndpointAddress(settings.namespace, "frontend", "http"),
        lambda stream: stream.end(),
        info={"http": address},
    )
    settle_garbage_collector()
    log.info("listening on http://%s", address)
    await asyncio.get_running_loop().create_future()
