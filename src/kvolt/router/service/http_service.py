"""RouterHttp: HTTP API of a standalone router, for stacks that are not kvolt's.

Each model has a Standalone, created by its first worker. Needs no workers, discovery or event plane of kvolt. Times are
the server's: a reservation with a `ttl_s` expires that long after it was made or renewed; one without lasts until it is
released.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.errors import MALFORMED, InvalidRequest, NotFound, Overloaded
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvChange, pack_hashes
from kvolt.core.load import LoadReport
from kvolt.router.choice import WorkerChoice
from kvolt.router.service.http_messages import (
    DEFAULT_MODEL,
    BlocksBody,
    EventsBody,
    FirstTokenBody,
    LoadBody,
    PlacementQuery,
    Registration,
    ReleaseBody,
    RenewalBody,
    placement_of,
    read,
    read_number,
)
from kvolt.router.service.standalone import Standalone
from kvolt.router.service.standalone_state import EventsMissed, StandaloneEvent
from kvolt.runtime.clock import Clock
from kvolt.runtime.http.server import (
    Handler,
    HttpLimits,
    HttpRequest,
    HttpServer,
    Observe,
    Response,
    Routes,
    json_error,
)
from kvolt.runtime.network import Network
from kvolt.runtime.tasks import TaskGroup

MAX_MODELS = 256

_LIMITS = HttpLimits(max_body_bytes=16 * 1024 * 1024)
_EXPIRE_EVERY_S = 1.0

NewStandalone = Callable[[int], Standalone]
"""Factory of a router by block size."""
Translate = Callable[[bytes], tuple[Sequence[KvChange], int | None]]
"""Convert an engine's event batch into changes and its rank, if it names one. Raises MsgspecError if malformed."""
NewTranslate = Callable[[int], Translate]
"""Factory of a converter by block size, for one rank of one worker."""

_WEB_PAGE = json_error(403, "the router does not take requests from web pages", "forbidden")


class RouterHttp:
    """See the module. `start`, then `close`."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        new_standalone: NewStandalone,
        translators: Mapping[str, NewTranslate] | None = None,
        show_metrics: Callable[[], tuple[bytes, str]] | None = None,
        observe: Observe | None = None,
    ) -> None:
        """`translators`: converters of engines' own event formats, by name."""
        self._new_standalone = new_standalone
        self._translators = translators or {}
        self._show_metrics = show_metrics
        self._converters: dict[tuple[str, InstanceId, int | None, str], Translate] = {}
        self._task_group = TaskGroup("router http")
        self._server = HttpServer(network, self._routes(), clock, _LIMITS, observe=observe)
        self.models: dict[str, Standalone] = {}

    async def start(self, address: str) -> str:
        self._task_group.start(self._expire(), "leases")
        return await self._server.start(address)

    async def close(self, drain_s: float = 0.0) -> None:
        await self._server.close(drain_s)
        await self._task_group.close()

    def _routes(self) -> Routes:
        routes = Routes()
        for method, path, handler in (
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/workers", self._workers),
            ("POST", "/v1/workers", self._register),
            ("DELETE", "/v1/workers/{worker}", self._unregister),
            ("POST", "/v1/workers/{worker}/kv_events", self._post_events),
            ("POST", "/v1/workers/{worker}/engine_events", self._post_engine_events),
            ("PUT", "/v1/workers/{worker}/blocks", self._put_blocks),
            ("POST", "/v1/workers/{worker}/load", self._post_load),
            ("POST", "/v1/query", self._query),
            ("POST", "/v1/explain", self._explain),
            ("POST", "/v1/route", self._route),
            ("POST", "/v1/reserve", self._reserve),
            ("POST", "/v1/reservations/{reservation}/first_token", self._first_token),
            ("POST", "/v1/reservations/{reservation}/renew", self._renew),
            ("POST", "/v1/reservations/{reservation}/release", self._release),
            ("DELETE", "/v1/reservations/{reservation}", self._release),
            ("GET", "/v1/loads", self._loads),
            ("GET", "/v1/dump", self._dump),
        ):
            routes.add(method, path, handler if method == "GET" else _not_for_web_pages(handler))
        return routes

    async def _expire(self) -> None:
        """Expire reservations regularly, so that metrics are right without requests."""
        while True:
            await asyncio.sleep(_EXPIRE_EVERY_S)
            for model in self.models.values():
                model.expire()

    # --- workers

    async def _register(self, request: HttpRequest) -> Response:
        registration = read(request.body, Registration)
        model = self.models.get(registration.model)
        if model is None:
            if len(self.models) >= MAX_MODELS:
                raise Overloaded(f"there are {MAX_MODELS} models already", queue="models", limit=MAX_MODELS)
            model = self._new_standalone(registration.block_size)
        worker = InstanceId(registration.worker)
        is_new = worker not in model.workers
        model.register(worker, registration.engine_info())
        self.models[registration.model] = model
        return _json(
            {"worker": worker, "model": registration.model, "is_new": is_new}, 201 if is_new else 200
        )

    async def _unregister(self, request: HttpRequest) -> Response:
        name, model, worker = self._worker_of(request)
        model.unregister(worker)
        self._converters = {key: each for key, each in self._converters.items() if key[:2] != (name, worker)}
        if not model.workers:
            del self.models[name]
        return _json({"worker": worker, "model": name})

    async def _workers(self, request: HttpRequest) -> Response:
        workers = [
            {
                "worker": worker,
                "model": name,
                "block_size": info.block_size,
                "dp_ranks": info.dp_ranks,
                "is_approximate": model.prefix_index.is_approximate(worker),
                "blocks": sum(each.num_blocks for each in model.event_index.digests(worker)),
                "taints": info.taints,
                "loras": info.loras,
            }
            for name, model in sorted(self.models.items())
            for worker, info in sorted(model.workers.items())
        ]
        return _json({"workers": workers})

    # --- KV events and load

    async def _post_events(self, request: HttpRequest) -> Response:
        _, model, worker = self._worker_of(request)
        body = read(request.body, EventsBody)
        return self._apply(model, worker, [each.event(model.block_size) for each in body.events])

    async def _post_engine_events(self, request: HttpRequest) -> Response:
        name, model, worker = self._worker_of(request)
        engine = request.query.get("format", "")
        if engine not in self._translators:
            engines = ", ".join(self._translators) or "none"
            raise InvalidRequest(f"format must be one of: {engines}", param="format")
        rank = read_number(request.query.get("dp_rank"), "dp_rank")
        # An engine's block ids are its own: each rank has a converter with its state.
        key = (name, worker, rank, engine)
        translate = self._converters.get(key)
        if translate is None:
            if rank not in (None, *model.workers[worker].dp_ranks):
                raise InvalidRequest(f"worker {worker!r} has no rank {rank}", param="dp_rank")
            translate = self._converters[key] = self._translators[engine](model.block_size)
        try:
            changes, batch_rank = translate(request.body)
        except MALFORMED as error:
            raise InvalidRequest(
                f"the body is not an event batch of {engine}: {error}", param="body"
            ) from None
        dp_rank = rank if rank is not None else batch_rank or 0
        return self._apply(model, worker, [StandaloneEvent(change, dp_rank) for change in changes])

    def _apply(self, model: Standalone, worker: InstanceId, events: Sequence[StandaloneEvent]) -> Response:
        num_unknown_before = model.event_index.stats.num_unknown_ranks
        try:
            num_applied = model.post(worker, events)
        except EventsMissed as error:
            body = {
                "error": {"message": str(error), "type": "events_missed", "code": "events_missed"},
                "expected": {"epoch": error.epoch, "event_id": error.expected_id},
            }
            return _json(body, 409)
        num_unknown = model.event_index.stats.num_unknown_ranks - num_unknown_before
        return _json({"applied": num_applied - num_unknown, "unknown_ranks": num_unknown})

    async def _put_blocks(self, request: HttpRequest) -> Response:
        _, model, worker = self._worker_of(request)
        body = read(request.body, BlocksBody)
        model.replace_blocks(worker, body.by_rank_and_tier(), body.epoch, body.next_id)
        return _json({"blocks": sum(each.num_blocks for each in model.event_index.digests(worker))})

    async def _post_load(self, request: HttpRequest) -> Response:
        _, model, worker = self._worker_of(request)
        model.on_report(LoadReport(worker, read(request.body, LoadBody).load()))
        return _json({})

    # --- decisions

    async def _query(self, request: HttpRequest) -> Response:
        _, choice, _ = self._choose(request)
        return _json(placement_of(choice))

    async def _explain(self, request: HttpRequest) -> Response:
        query = read(request.body, PlacementQuery)
        model = self._model(query.model)
        rows = model.explain(query.request(model.block_size), list(map(InstanceId, query.excluded)))
        return _json({"candidates": rows})

    async def _route(self, request: HttpRequest) -> Response:
        return self._reserved_choice(*self._choose(request))

    async def _reserve(self, request: HttpRequest) -> Response:
        """Reserve a worker that the caller has chosen."""
        model, choice, query = self._choose(request)
        if query.worker is None:
            raise InvalidRequest("name a worker, or use /v1/route", param="worker")
        return self._reserved_choice(model, choice, query)

    def _choose(self, request: HttpRequest) -> tuple[Standalone, WorkerChoice, PlacementQuery]:
        query = read(request.body, PlacementQuery)
        model = self._model(query.model)
        excluded = list(map(InstanceId, query.excluded))
        choice = model.choose(query.request(model.block_size), excluded)
        if choice.is_saturated and query.refuse_saturated:
            raise Overloaded(
                "all workers that can take the request are saturated: retry later", queue="workers"
            )
        return model, choice, query

    def _reserved_choice(self, model: Standalone, choice: WorkerChoice, query: PlacementQuery) -> Response:
        reservation = model.reserve(choice, query.ttl_s)
        return _json(placement_of(choice, reservation.id, query.ttl_s), 201)

    # --- reservations

    async def _first_token(self, request: HttpRequest) -> Response:
        body = read(request.body, FirstTokenBody)
        model, reservation_id = self._reserved(request)
        model.mark_first_token(reservation_id, body.cached_tokens)
        return _json({})

    async def _renew(self, request: HttpRequest) -> Response:
        body = read(request.body, RenewalBody)
        model, reservation_id = self._reserved(request)
        model.renew(reservation_id, body.ttl_s)
        return _json({"ttl_s": body.ttl_s})

    async def _release(self, request: HttpRequest) -> Response:
        end = read(request.body, ReleaseBody)
        usage = None
        if end.completion_tokens is not None:
            usage = Usage(end.prompt_tokens, end.completion_tokens, end.cached_tokens)
        model, reservation_id = self._reserved(request)
        model.release(reservation_id, usage, end.worker_outcome)
        return _json({})

    # --- display

    async def _loads(self, request: HttpRequest) -> Response:
        return _json(
            {
                name: {"reservations": model.num_reservations, "worker_ranks": model.worker_loads()}
                for name, model in self._selected_models(request).items()
            }
        )

    async def _dump(self, request: HttpRequest) -> Response:
        """Counts and digests; with `worker` and `hashes=true` the blocks of that worker."""
        worker = request.query.get("worker")
        if worker is not None and request.query.get("hashes") in ("1", "true"):
            return self._dump_worker(request, InstanceId(worker))
        return _json(
            {
                name: {
                    "index_bytes": model.event_index.index.num_bytes,
                    "index_blocks": model.event_index.index.num_blocks,
                    "workers": {
                        each: model.event_index.digests(each)
                        for each in sorted(model.workers)
                        if worker is None or each == worker
                    },
                }
                for name, model in self._selected_models(request).items()
            }
        )

    def _dump_worker(self, request: HttpRequest, worker: InstanceId) -> Response:
        model = self._model(request.query.get("model", DEFAULT_MODEL))
        if worker not in model.workers:
            raise NotFound(f"there is no worker {worker!r}", kind="worker", name=worker)
        index = model.event_index
        blocks = [
            {
                **msgspec.structs.asdict(each),
                "hashes": _base64(index.contents(worker, each.dp_rank, each.tier)),
            }
            for each in index.digests(worker)
        ]
        return _json({"worker": worker, "blocks": blocks})

    async def _health(self, request: HttpRequest) -> Response:
        workers = sum(len(model.workers) for model in self.models.values())
        return _json({"status": "ok", "models": len(self.models), "workers": workers})

    async def _metrics(self, request: HttpRequest) -> Response:
        if self._show_metrics is None:
            raise NotFound("metrics are not enabled", kind="path", name="/metrics")
        body, content_type = self._show_metrics()
        return Response(200, body, content_type=content_type)

    # ---

    def _model(self, name: str) -> Standalone:
        model = self.models.get(name)
        if model is None:
            raise NotFound(
                f"there is no model {name!r}: register a worker for it first",
                kind="model",
                name=name,
                param="model",
            )
        return model

    def _reserved(self, request: HttpRequest) -> tuple[Standalone, str]:
        """Router and id of a reservation of any model. Raises NotFound if it has ended."""
        reservation_id = request.params["reservation"]
        for model in self.models.values():
            if model.has_reservation(reservation_id):
                return model, reservation_id
        raise NotFound(
            f"there is no reservation {reservation_id[:64]!r}: released, expired, or its worker is gone",
            kind="reservation",
            name=reservation_id,
        )

    def _selected_models(self, request: HttpRequest) -> dict[str, Standalone]:
        name = request.query.get("model")
        return dict(sorted(self.models.items())) if name is None else {name: self._model(name)}

    def _worker_of(self, request: HttpRequest) -> tuple[str, Standalone, InstanceId]:
        name = request.query.get("model", DEFAULT_MODEL)
        model = self._model(name)
        worker = InstanceId(request.params["worker"])
        if worker not in model.workers:
            raise NotFound(f"there is no worker {worker!r}: register it first", kind="worker", name=worker)
        return name, model, worker


def _json(content: Any, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(content))


def _base64(hashes: Sequence[int]) -> str:
    return base64.b64encode(pack_hashes(sorted(hashes))).decode()


def _not_for_web_pages(handler: Handler) -> Handler:
    # Browsers name their origin: a web page could otherwise post to loopback.
    async def guarded(request: HttpRequest) -> Any:
        if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") != "none":
            return _WEB_PAGE
        return await handler(request)

    return guarded
