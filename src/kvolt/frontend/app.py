"""Public HTTP API: routes, handlers and the server. `generate` handles chat and completions; all other handlers are
here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import UNSET

from kvolt.core.endpoints import QUEUE_DETAILS
from kvolt.core.errors import InvalidRequest, Unavailable
from kvolt.core.request import Role
from kvolt.frontend.admin.trace_recorder import TraceRecorder
from kvolt.frontend.admission import Admission
from kvolt.frontend.generate import GenerateOptions, Generation
from kvolt.frontend.metrics.edge_metrics import FrontendMetrics
from kvolt.frontend.metrics.models_metrics import ModelsCollector
from kvolt.frontend.model import Model, count_workers
from kvolt.frontend.models import Models
from kvolt.frontend.off_loop import INLINE_TOKENS
from kvolt.frontend.openai_api import responses
from kvolt.frontend.openai_api.checks import check_vocabulary, parse_detokenize, parse_tokenize
from kvolt.frontend.openai_api.decoding import RequestDecoder
from kvolt.frontend.openai_api.errors import openai_error
from kvolt.frontend.openai_api.headers import REQUEST_ID
from kvolt.frontend.openai_api.templating import build_template_input
from kvolt.frontend.openapi.docs_page import docs_page
from kvolt.frontend.openapi.document import openapi
from kvolt.frontend.siblings import Siblings
from kvolt.frontend.tenants.access import AccessGuard, caller_of, names_of
from kvolt.frontend.tenants.records import needed_scope
from kvolt.frontend.tenants.usage import USAGE_DETAILS
from kvolt.frontend.tokenization.preprocess import MAX_CONTEXTS
from kvolt.journey.prefill import RoleTarget
from kvolt.router.breaker import BREAKER_DETAILS
from kvolt.router.metrics import KvCollector, describe_breakers, describe_queues
from kvolt.runtime.http.cors import CorsPolicy
from kvolt.runtime.http.server import Handler, HttpLimits, HttpRequest, HttpServer, Response, Routes
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import Network
from kvolt.runtime.runtime import Runtime
from kvolt.version import __version__

T = TypeVar("T")

_json = msgspec.json.Encoder().encode
_busy_threshold = RequestDecoder(responses.BusyThreshold)


_NOT_AVAILABLE = {
    "/v1/embeddings": "embeddings are not available over HTTP yet",
    "/v1/responses": "the Responses API is not available yet; use /v1/chat/completions",
}


class FrontendApp:
    """HTTP handlers; `routes` returns the route table for an HttpServer."""

    def __init__(
        self,
        models: Models,
        generation: Generation,
        admission: Admission,
        metrics: Metrics,
        started_at: int,
        siblings: Siblings | None = None,
    ) -> None:
        self._models = models
        self._generation = generation
        self._admission = admission
        self._metrics = metrics
        self._started_at = started_at
        self._siblings = siblings
        """Other frontend processes on the same port; metrics and thresholds cover all of them."""
        self._openapi: bytes | None = None
        self._docs: bytes | None = None
        self._routes: tuple[str, ...] = ()

    def routes(self) -> Routes:
        routes = Routes()
        table: tuple[tuple[str, str, Handler], ...] = (
            ("POST", "/v1/chat/completions", self._generation.chat),
            ("POST", "/v1/completions", self._generation.complete),
            ("GET", "/v1/models", self._list_models),
            ("GET", "/v1/models/{model}/ready", self._show_ready),
            ("GET", "/v1/models/{model}", self._show_model),
            ("GET", "/v1/models/{model:path}", self._show_long_name),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("GET", "/health", self._show_health),
            ("GET", "/ready", self._show_health),
            ("GET", "/live", self._show_live),
            ("GET", "/metrics", self._show_metrics),
            ("GET", "/busy_threshold", self._list_thresholds),
            ("POST", "/busy_threshold", self._set_threshold),
            ("GET", "/openapi.json", self._show_openapi),
            ("GET", "/docs", self._show_docs),
            ("GET", "/version", self._show_version),
            ("GET", "/ping", self._ping),
            ("POST", "/ping", self._ping),
            ("GET", "/", self._show_server),
        )
        self._routes = tuple(f"{method} {path}" for method, path, _ in table if not path.endswith(":path}"))
        for method, path, handler in table:
            routes.add(method, path, self._guarded(method, path, handler))
        routes.notes.update(_NOT_AVAILABLE)
        return routes

    def _guarded(self, method: str, path: str, handler: Handler) -> Handler:
        """The handler behind the check of API keys, if there are any and the route needs one."""
        access = self._generation.access
        scope = needed_scope(path)
        return handler if access is None or scope is None else access.protect(handler, scope)

    # --- models

    async def _list_models(self, request: HttpRequest) -> Response:
        named = [(name, model) for model in self._models.ready() for name in self._models.names_of(model)]
        named += [(adapter.name, adapter) for adapter in self._models.adapters()]
        caller = caller_of(request)
        data = [
            self._describe(name, model)
            for name, model in named
            if caller is None or caller.allows((name, *names_of(self._models, model)))
        ]
        return Response(200, _json(responses.ModelList(data=data)))

    async def _show_model(self, request: HttpRequest) -> Response:
        name = request.params["model"]
        return Response(200, _json(self._describe(name, self._generation.find_model(request, name))))

    async def _show_long_name(self, request: HttpRequest) -> Response:
        """Model names with slashes, which many clients do not escape."""
        name = request.params["model"]
        ready = name.endswith("/ready")
        request.params = {"model": name.removesuffix("/ready")}
        return await (self._show_ready(request) if ready else self._show_model(request))

    def _describe(self, name: str, model: Model) -> responses.Model:
        length = model.card.context_length
        return responses.Model(
            id=name,
            created=self._started_at,
            root=model.root,
            alias_of=UNSET if name == model.name else model.name,
            parent=None if model.lora is None else model.card.name,
            context_window=length,
            max_model_len=length,
            default_sampling_params=model.card.defaults,
            workers=count_workers(model),
        )

    async def _show_ready(self, request: HttpRequest) -> Response:
        name = request.params["model"]
        caller = caller_of(request)
        if caller is not None and caller.tenant.models and not caller.allows((name,)):
            self._generation.find_model(request, name)
        body = _readiness(self._models, name)
        return Response(200 if body.ready else 503, _json(body))

    # --- tokens

    async def _tokenize(self, request: HttpRequest) -> Response:
        await self._charge(request)
        parsed = await self._generation.bodies.parse(request, parse_tokenize)
        api_request, is_large = parsed.request, parsed.is_large
        model = self._generation.find_model(request, api_request.model)
        processor = model.processor
        if api_request.messages is not None:
            template_input = await self._off_loop(
                lambda: build_template_input(api_request, None, is_large), is_large
            )
            text, param, special = (
                await processor.render(template_input),
                "messages",
                bool(api_request.add_special_tokens),
            )
        else:
            text, param, special = (
                api_request.prompt or "",
                "prompt",
                api_request.add_special_tokens is not False,
            )
        (token_ids,) = await processor.encode([text], param, special)

        def answer() -> bytes:
            texts = None
            if api_request.return_token_strs:
                texts = [processor.vocabulary.token_text(token_id) for token_id in token_ids]
            return _json(
                responses.TokenizeResponse(
                    count=len(token_ids),
                    max_model_len=model.card.context_length,
                    tokens=list(token_ids),
                    token_strs=texts,
                )
            )

        return Response(200, await self._off_loop(answer, len(token_ids) > INLINE_TOKENS))

    async def _detokenize(self, request: HttpRequest) -> Response:
        await self._charge(request)
        parsed = await self._generation.bodies.parse(request, parse_detokenize)
        api_request = parsed.request
        model = self._generation.find_model(request, api_request.model)
        max_tokens = MAX_CONTEXTS * model.card.context_length
        if len(api_request.tokens) > max_tokens:
            raise InvalidRequest(
                f"{len(api_request.tokens)} tokens exceed the limit of {max_tokens}; send fewer tokens",
                param="tokens",
            )
        vocabulary = model.processor.vocabulary

        def answer() -> bytes:
            check_vocabulary(api_request, vocabulary.size)
            text = vocabulary.decode(api_request.tokens, skip_special_tokens=False)
            return _json(responses.DetokenizeResponse(prompt=text))

        return Response(200, await self._off_loop(answer, len(api_request.tokens) > INLINE_TOKENS))

    async def _charge(self, request: HttpRequest) -> None:
        """Charge the request to its tenant's request limit."""
        if self._generation.access is not None:
            await self._generation.access.take_request(request)

    async def _off_loop(self, call: Callable[[], T], is_large: bool) -> T:
        return await self._generation.off_loop.run(call) if is_large else call()

    # --- the server itself

    async def _show_health(self, request: HttpRequest) -> Response:
        """Return 503 until at least one model can be routed."""
        ready = self._models.ready()
        health = responses.Health(
            status="ready" if ready else "no_models",
            models=[model.card.name for model in ready],
            workers={model.card.name: len(model.client.candidates()) for model in ready},
            roles={model.card.name: count_workers(model) for model in ready},
            missing=_missing_roles(self._models),
        )
        return Response(200 if ready else 503, _json(health))

    async def _ping(self, request: HttpRequest) -> Response:
        """SageMaker's health check."""
        if not self._models.ready():
            raise Unavailable("no model is ready", reason="no_models")
        return Response(200, content_type="")

    async def _show_version(self, request: HttpRequest) -> Response:
        return Response(200, _json(responses.Version(version=__version__)))

    async def _show_server(self, request: HttpRequest) -> Response:
        return Response(200, _json(responses.Server(version=__version__, routes=self._routes)))

    async def _show_live(self, request: HttpRequest) -> Response:
        return Response(200, _json(responses.Live()))

    async def _show_metrics(self, request: HttpRequest) -> Response:
        siblings = self._siblings
        body, content_type = self._metrics.render() if siblings is None else await siblings.metrics()
        return Response(200, body, content_type=content_type)

    async def _list_thresholds(self, request: HttpRequest) -> Response:
        thresholds = [self._admission.threshold(model.card.name) for model in self._models.all()]
        return Response(200, _json(responses.BusyThresholds(thresholds=thresholds)))

    async def _set_threshold(self, request: HttpRequest) -> Response:
        threshold = (await self._generation.bodies.parse(request, _busy_threshold.decode)).request
        name = self._models.find(threshold.model).card.name  # resolve an alias
        threshold = msgspec.structs.replace(threshold, model=name)
        siblings = self._siblings
        changed = (
            self._admission.set_threshold(threshold)
            if siblings is None
            else await siblings.set_threshold(threshold)
        )
        return Response(200, _json(changed))

    async def _show_openapi(self, request: HttpRequest) -> Response:
        if self._openapi is None:
            self._openapi = _json(openapi())
        return Response(200, self._openapi)

    async def _show_docs(self, request: HttpRequest) -> Response:
        if self._docs is None:
            self._docs = docs_page(openapi())
        return Response(200, self._docs, content_type="text/html; charset=utf-8")


def _missing_roles_of(model: Model) -> list[str]:
    """Roles that the model lacks to serve requests."""
    return [] if model.ready else [model.role.value]


def _missing_roles(models: Models) -> dict[str, list[str]]:
    """Missing roles of every model that cannot be served now."""
    known = {model.card.name: _missing_roles_of(model) for model in models.all() if not model.ready}
    return known | {name: [Role.DECODE.value] for name in models.prefill_only()}


def _readiness(models: Models, name: str) -> responses.ModelReady:
    """Readiness of a model by namespace; raises NotFound for an unknown name."""
    targets = models.prefill_only().get(name)
    if targets is not None:
        return responses.ModelReady(
            model=name,
            ready=False,
            namespaces={
                prefill_target.client.endpoint.namespace: _prefill_only_readiness(prefill_target)
                for prefill_target in targets
            },
        )
    model = models.find(name)
    namespace = responses.NamespaceReady(
        ready=model.ready, workers=count_workers(model), missing=_missing_roles_of(model)
    )
    return responses.ModelReady(
        model=model.name, ready=model.ready, namespaces={model.client.endpoint.namespace: namespace}
    )


def _prefill_only_readiness(prefill_target: RoleTarget) -> responses.NamespaceReady:
    workers = {Role.PREFILL.value: len(prefill_target.client.candidates()), Role.DECODE.value: 0}
    return responses.NamespaceReady(ready=False, workers=workers, missing=[Role.DECODE.value])


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
    cors: CorsPolicy | None = None,
    access: AccessGuard | None = None,
) -> HttpServer:
    """Build the public HTTP server, not started, and register its metrics with `metrics`."""
    own = FrontendMetrics()
    own.add(ModelsCollector(models).collect)
    own.add(KvCollector(models.routers).collect)
    metrics.registry.register(own)
    runtime.add_status_details(BREAKER_DETAILS, lambda: describe_breakers(models.routers()))
    runtime.add_status_details(QUEUE_DETAILS, lambda: describe_queues(models.routers()))
    if access is not None:
        own.add(access.usage.collect)
        runtime.add_status_details(USAGE_DETAILS, access.usage.describe)
    limits = limits or HttpLimits()
    generation = Generation(runtime, models, admission, own, options, recorder, limits.max_body_bytes, access)
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
        cors,
    )
    server.tick.observe = own.stages["write"].observe
    return server
