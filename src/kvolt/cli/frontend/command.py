"""`kvolt frontend`: the OpenAI-compatible HTTP frontend."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvolt.cli.flags import option
from kvolt.cli.frontend.access import open_access
from kvolt.cli.frontend.edge_member import SETTLE_S, Member, Membership
from kvolt.cli.process import Process, run_process
from kvolt.core.endpoints import EndpointAddress
from kvolt.frontend.admin.explain import RouteExplainer
from kvolt.frontend.admin.lora_admin import load_adapter, unload_adapter
from kvolt.frontend.admin.trace_recorder import TraceRecorder
from kvolt.frontend.admin.worker_commands import clear_kv_blocks
from kvolt.frontend.admission import Admission, LatestLoads
from kvolt.frontend.app import build_server
from kvolt.frontend.generate import GenerateOptions
from kvolt.frontend.model import ModelOptions
from kvolt.frontend.models import Models
from kvolt.frontend.processors.registry import find_processor
from kvolt.frontend.tokenization.preprocess import ParserNames
from kvolt.journey.prefill_mode import PrefillModeRules
from kvolt.router.port import Router, RouterContext
from kvolt.router.registry import NewRouter, find_router
from kvolt.router.service.client import remote_router
from kvolt.router.service.link import RouterLink
from kvolt.router.service.metrics import LinkCollector
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.config.settings import FrontendSettings, Settings
from kvolt.runtime.host.memory import return_freed_memory, settle_garbage_collector
from kvolt.runtime.http.cors import CorsPolicy
from kvolt.runtime.http.server import HttpLimits
from kvolt.runtime.network import Network, SocketNetwork, join_address
from kvolt.runtime.security.credentials import ServerCertificate
from kvolt.runtime.security.identity import ProcessRole
from kvolt.runtime.security.secure_network import HttpsNetwork
from kvolt.runtime.tasks import Scope, TaskGroup

HELP = """
Start the OpenAI-compatible HTTP frontend. It finds workers through discovery and serves their models.

Examples:
  kvolt frontend                                  on 127.0.0.1:8000, with the workers of this machine
  kvolt frontend --host 0.0.0.0 --port 80
  kvolt frontend --router least-loaded
  kvolt frontend --router policy.py:cost          a custom routing policy (docs/router.md)
  kvolt frontend --processes 4                    four processes on one port, and a router process
  kvolt frontend --set router.process=true        route through the namespace's `kvolt router`
  kvolt frontend --attach http://10.0.0.7:8000,events=tcp://10.0.0.7:5557
                                                  route to a running vLLM or SGLang server
  kvolt frontend --set frontend.processor=vllm --tool-parser kimi_k2 --reasoning-parser kimi_k2
                                                  use vLLM's chat processing (docs/engines.md)
  kvolt frontend --discovery-join-listen 10.0.0.5:7400
                                                  accept workers with --join 10.0.0.5:7400
"""

log = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    option(parser, "--name", None, "Name of this process in logs and status.", default="frontend")
    _add_attach_flags(parser)
    # Set by the supervisor for each of several frontend processes.
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--slot", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--counts", type=Path, help=argparse.SUPPRESS)


def _add_attach_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attach",
        action="append",
        default=[],
        metavar="URL[,NAME=VALUE...]",
        help="Route requests to a running vLLM or SGLang server; repeatable. NAME is `events` (its KV event "
        "publisher, tcp://HOST:PORT), `replay`, `tokenizer`, `model`, `api_key` or another argument of the remote "
        "engine (`kvolt engine list remote`).",
    )
    parser.add_argument(
        "--kv-events",
        action=_AppendEvents,
        metavar="ENDPOINT",
        help="KV event publisher of the preceding --attach; the same as events=ENDPOINT.",
    )


class _AppendEvents(argparse.Action):
    """Append the event endpoint to the preceding `--attach`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if not namespace.attach:
            parser.error(f"{option_string} needs an --attach before it")
        namespace.attach[-1] += f",events={values}"


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    settings = loaded.settings
    member = Member(args.group, args.slot, args.counts) if args.group and args.counts else None
    if args.attach:
        _check_processor(settings.frontend)
        return _run_attached(args, settings)
    if settings.frontend.processes > 1 and member is None:
        # Imported here to keep the supervisor out of the memory of every HTTP process.
        from kvolt.cli.serve.command import serve

        return serve(msgspec.structs.replace(settings, workers=[]))

    _check_processor(settings.frontend)
    return_freed_memory()

    async def body(process: Process) -> None:
        await serve_http(process, settings, member)

    return run_process(settings, args.name, body, ProcessRole.FRONTEND)


def _run_attached(args: argparse.Namespace, settings: Settings) -> int:
    """Run the frontend with external servers as workers in the same process."""
    from kvolt.cli.frontend.attach import Attached, parse_attached

    attached = parse_attached(args.attach, settings)
    return_freed_memory()

    async def body(process: Process) -> None:
        async with Scope("frontend") as scope:
            scope.start(serve_http(process, settings), "http")
            scope.start(Attached(process, attached).run(), "attached")

    return run_process(settings, args.name, body, ProcessRole.FRONTEND)


def _new_router(settings: Settings, link: RouterLink | None) -> NewRouter:
    """Router of this process, or a client of the router process with a local fallback while it is unreachable."""
    new_router = find_router(settings.frontend.router, settings.router)
    return new_router if link is None else remote_router(link, partial(_without_events, new_router))


def _without_events(new_router: NewRouter, context: RouterContext) -> Router:
    """Create a fallback router without KV events, so that each process does not keep its own index."""
    settings = msgspec.structs.replace(context.settings, events=False)
    return new_router(replace(context, settings=settings))


def _parsers(frontend: FrontendSettings) -> ParserNames:
    return ParserNames(frontend.tool_parser, frontend.reasoning_parser)


def _check_processor(frontend: FrontendSettings) -> None:
    """Check and load the processor before the event loop starts: imports of a plugin may take seconds."""
    find_processor(frontend.processor).check(_parsers(frontend))


def _client_network(process: Process, frontend: FrontendSettings, reuse_port: bool) -> Network:
    """Network of the HTTP API: HTTPS if there is a certificate."""
    if frontend.tls_cert is None or frontend.tls_key is None:
        return SocketNetwork(reuse_port)
    clients = Path(frontend.tls_client_authority) if frontend.tls_client_authority else None
    certificate = ServerCertificate(Path(frontend.tls_cert), Path(frontend.tls_key), clients)
    task_group = TaskGroup("https-certificate")
    task_group.start(certificate.keep_fresh(process.runtime.ports.blocking), "keep fresh")

    async def close(drain_s: float) -> None:
        await task_group.close()

    process.before_close(close)
    return HttpsNetwork(certificate, process.metrics.count_handshake, reuse_port)


def prefill_mode_rules(frontend: FrontendSettings) -> PrefillModeRules:
    return PrefillModeRules(
        is_predicted=frontend.prefill_choice == "predicted",
        min_tokens=frontend.prefill_min_tokens,
        max_queue_s=frontend.prefill_max_queue_s,
        ttft_s=frontend.target_ttft_s,
        itl_s=frontend.target_itl_s,
    )


async def serve_http(process: Process, settings: Settings, member: Member | None = None) -> None:
    """Serve until the process is stopped; running requests finish first."""
    runtime = process.runtime
    frontend = settings.frontend
    link = None
    if member is not None or settings.router.process:
        link = await RouterLink.to(runtime, settings.namespace)
        process.metrics.registry.register(LinkCollector(link))
    membership = Membership(process, member, link) if member is not None and link is not None else None
    namespaces = [name.strip() for name in (frontend.namespaces or settings.namespace).split(",")]
    models = Models(
        runtime,
        [name for name in namespaces if name],
        ModelOptions(
            frontend.token_cache_bytes,
            _parsers(frontend),
            frontend.max_attempts,
            settings.router,
            frontend.migration_limit,
            prefill_mode_rules(frontend),
            tuple(name.strip() for name in frontend.decode_first.split(",") if name.strip()),
            find_processor(frontend.processor).build,
        ),
        _new_router(settings, link),
    )
    access = await open_access(process, member is None or member.slot == 0)
    loads = LatestLoads()
    admission = Admission(loads, frontend.max_requests, membership.slot if membership is not None else None)
    recorder = TraceRecorder(runtime.ports.clock.monotonic)
    server = build_server(
        runtime,
        models,
        admission,
        process.metrics,
        GenerateOptions(
            strict_fields=frontend.strict_fields,
            hold_headers_s=frontend.hold_headers_s,
            request_timeout_s=frontend.request_timeout_s,
            max_priority=settings.router.max_priority,
        ),
        limits=HttpLimits(
            max_body_bytes=frontend.max_body_bytes,
            header_timeout_s=frontend.header_timeout_s,
            body_timeout_s=frontend.body_timeout_s,
            write_timeout_s=frontend.write_timeout_s,
        ),
        network=_client_network(process, frontend, reuse_port=membership is not None),
        siblings=None if membership is None else membership.siblings(admission),
        recorder=recorder,
        cors=CorsPolicy(frontend.cors_origins) if frontend.cors_origins else None,
        access=access,
    )
    task_group = TaskGroup("frontend")
    task_group.start(loads.subscribe(runtime.events), "loads")

    async def stop(drain_s: float) -> None:
        await server.close(drain_s)
        recorder.close()
        if membership is not None:
            await membership.close()
        await task_group.close()
        await models.close()
        if link is not None:
            await link.close()

    process.before_close(stop)
    runtime.commands = {
        "clear_kv_blocks": lambda body: clear_kv_blocks(runtime, models),
        "load_lora_adapter": lambda body: load_adapter(runtime, models, body),
        "unload_lora_adapter": lambda body: unload_adapter(runtime, models, body),
    }
    recorder.register_endpoint(runtime.server)
    explainer = RouteExplainer(models, runtime.options.name)
    explainer.register_endpoint(runtime.server)
    runtime.commands["explain_route"] = explainer.explain
    models.start()
    # Open the port after discovery has been read.
    await (models.wait_settled(SETTLE_S) if membership is None else membership.settle(models))
    address = await server.start(join_address(frontend.host, frontend.port))
    scheme = "http" if frontend.tls_cert is None else "https"
    await runtime.serve_streams(
        EndpointAddress(settings.namespace, "frontend", "http"),
        lambda stream: stream.end(),
        info={"http": address, "scheme": scheme},
    )
    settle_garbage_collector()
    log.info("listening on %s://%s", scheme, address)
    await asyncio.get_running_loop().create_future()
