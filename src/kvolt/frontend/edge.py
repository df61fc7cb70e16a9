"""The parts of an edge put together into a server: the command and the tests wire it the same way."""

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
from kvolt.router.breaker_report import BREAKER_DETAILS, describe_breakers
from kvolt.router.kv_metrics import KvCollector
from kvolt.runtime.http.server import HttpLimits, HttpServer
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import Network
from kvolt.runtime.runtime import Runtime


def edge_server(
    runtime: Runtime,
    models: Models,
    admission: Admission,
    metrics: Metrics,
    options: GenerateOptions,
    *,
    metrics_prefix: str = "dynamo_frontend",
    limits: HttpLimits | None = None,
    network: Network | None = None,
    siblings: Siblings | None = None,
    recorder: TraceRecorder | None = None,
) -> HttpServer:
    """A server of the public interface, not started. What it measures is registered with `metrics`; who wants traces
    of it recorded gives the recorder."""
    own = FrontendMetrics(metrics_prefix)
    own.add(ModelsCollector(models, metrics_prefix).collect)
    own.add(KvCollector(models.routers, metrics_prefix).collect)
    metrics.registry.register(own)
    runtime.add_details(BREAKER_DETAILS, lambda: describe_breakers(models.routers()))
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
