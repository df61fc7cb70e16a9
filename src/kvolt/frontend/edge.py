"""Assembles the public HTTP server of a frontend, for the command and for tests."""

from __future__ import annotations

from kvolt.frontend.admin.trace_recorder import TraceRecorder
from kvolt.frontend.admission import Admission
from kvolt.frontend.app import FrontendApp
from kvolt.frontend.generate import GenerateOptions, Generation
from kvolt.frontend.metrics.edge_metrics import FrontendMetrics
from kvolt.frontend.metrics.models_metrics import ModelsCollector
from kvolt.frontend.models import Models
from kvolt.frontend.openai_api.errors import openai_error
from kvolt.frontend.openai_api.headers import REQUEST_ID
from kvolt.frontend.siblings import Siblings
from kvolt.router.metrics import BREAKER_DETAILS, KvCollector, describe_breakers
from kvolt.runtime.http.server import HttpLimits, HttpServer
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import Network
from kvolt.runtime.runtime import Runtime


def build_server(
    runtime: Runtime,
    models: Models,
    admission: Admission,
    metrics: Metrics,
    options: GenerateOptions,
    *,
    limits: HttpLimits | None = None,
    network: Network | None = None,
    siblings: Siblings | None = None,
    recorder: TraceRecorder | None = None,
) -> HttpServer:
    """Build the public HTTP server, not started, and register its metrics with `metrics`."""
    own = FrontendMetrics()
    own.add(ModelsCollector(models).collect)
    own.add(KvCollector(models.routers).collect)
    metrics.registry.register(own)
    runtime.add_status_details(BREAKER_DETAILS, lambda: describe_breakers(models.routers()))
    generation = Generation(runtime, models, admission, own, options, recorder)
    clock = runtime.ports.clock
    app = FrontendApp(models, generation, admission, metrics, int(clock.wall()), siblings)
    server = HttpServer(
        network or runtime.ports.network,
        app.routes(),
        clock,
        limits,
        openai_error,
        metrics.http_observer("frontend"),
        runtime.ports.rng,
        REQUEST_ID,
    )
    server.tick.observe = own.stages["write"].observe
    return server
