"""RouterHttp: a router over HTTP for stacks that are not kvolt's: routes and their answers.

A model is a Standalone, made by the first worker that registers for it. Decides and carries nothing; needs no worker,
discovery or event plane of kvolt's. Times are the server's: a reservation with a `ttl_s` is over when that has passed
since it was made or renewed, one without lasts until it is freed.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.errors import InvalidRequest, NotFound, Overloaded
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvChange
from kvolt.core.load import LoadReport
from kvolt.core.packed_hashes import packed
from kvolt.router.policy.selector import Choice
from kvolt.router.service.http_messages import (
    DEFAULT_MODEL,
    BegunToPost,
    BlocksToPost,
    EndToPost,
    EventsToPost,
    LoadToPost,
    Placed,
    Question,
    Registration,
    RenewalToPost,
    placed,
    read,
)
from kvolt.router.service.standalone import Standalone
from kvolt.router.service.standalone_state import EventsMissed, PostedEvent
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
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.tasks import Crew

MAX_MODELS = 256

_LIMITS = HttpLimits(max_body_bytes=16 * 1024 * 1024)
_EXPIRE_EVERY_S = 1.0

NewStandalone = Callable[[int], Standalone]
"""From a block size."""
Translate = Callable[[bytes], tuple[Sequence[KvChange], int | None]]
"""A batch of an engine's own events as ours, and of which rank they are, if it says. MsgspecError if it is none."""
NewTranslate = Callable[[int], Translate]
"""From a block size, for one rank of one worker."""

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
        """`translators` are the engines whose own events are understood, by name."""
        self._new_standalone = new_standalone
        self._translators = translators or {}
        self._show_metrics = show_metrics
        self._translating: dict[tuple[str, InstanceId, int | None, str], Translate] = {}
        self._crew = Crew("router http")
        self._server = HttpServer(network, self._routes(), clock, _LIMITS, observe=observe)
        self.models: dict[str, Standalone] = {}

    async def start(self, address: str) -> str:
        self._crew.start(self._expire(), "leases")
        return await self._server.start(address)

    async def close(self, drain_s: float = 0.0) -> None:
        await self._server.close(drain_s)
        await self._crew.close()

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
            ("POST", "/v1/reservations/{reservation}/begun", self._begun),
            ("POST", "/v1/reservations/{reservation}/renew", self._renew),
            ("POST", "/v1/reservations/{reservation}/free", self._free),
            ("DELETE", "/v1/reservations/{reservation}", self._free),
            ("GET", "/v1/loads", self._loads),
            ("GET", "/v1/dump", self._dump),
        ):
            routes.add(method, path, handler if method == "GET" else _not_for_web_pages(handler))
        return routes

    async def _expire(self) -> None:
        """What is asked looks for itself; this is for figures that nobody asks for."""
        while True:
            await asyncio.sleep(_EXPIRE_EVERY_S)
            for model in self.models.values():
                model.expire()

    # --- workers

    async def _register(self, request: HttpRequest) -> Response:
        wanted = read(request.body, Registration)
        model = self.models.get(wanted.model)
        if model is None:
            if len(self.models) >= MAX_MODELS:
                raise Overloaded(f"there are {MAX_MODELS} models already", queue="models", limit=MAX_MODELS)
            model = self._new_standalone(wanted.block_size)
        worker = InstanceId(wanted.worker)
        is_new = worker not in model.workers
        model.register(worker, wanted.engine_info())
        self.models[wanted.model] = model
        return _json({"worker": worker, "model": wanted.model, "is_new": is_new}, 201 if is_new else 200)

    async def _unregister(self, request: HttpRequest) -> Response:
        name, model, worker = self._worker_of(request)
        model.unregister(worker)
        for key in [key for key in self._translating if key[:2] == (name, worker)]:
            del self._translating[key]
        if not model.workers:
            del self.models[name]
        return _json({"worker": worker, "model": name})

    async def _workers(self, request: HttpRequest) -> Response:
        told = [
            {
                "worker": worker,
                "model": name,
                "block_size": info.block_size,
                "dp_ranks": info.dp_ranks,
                "is_approximate": model.holders.is_approximate(worker),
                "blocks": sum(each.num_blocks for each in model.posted.digests(worker)),
                "taints": info.taints,
                "loras": info.loras,
            }
            for name, model in sorted(self.models.items())
            for worker, info in sorted(model.workers.items())
        ]
        return _json({"workers": told})

    # --- what they hold and do

    async def _post_events(self, request: HttpRequest) -> Response:
        _, model, worker = self._worker_of(request)
        posted = read(request.body, EventsToPost)
        return self._take(model, worker, [each.event(model.block_size) for each in posted.events])

    async def _post_engine_events(self, request: HttpRequest) -> Response:
        name, model, worker = self._worker_of(request)
        engine = request.query.get("format", "")
        if engine not in self._translators:
            known = ", ".join(self._translators) or "none"
            raise InvalidRequest(f"format must be an engine whose events are known: {known}", param="format")
        rank = _number(request, "dp_rank")
        # An engine's names of blocks are its own: what they stand for is kept for each rank.
        key = (name, worker, rank, engine)
        translate = self._translating.get(key)
        if translate is None:
            if rank not in (None, *model.workers[worker].dp_ranks):
                raise InvalidRequest(f"worker {worker!r} has no rank {rank}", param="dp_rank")
            translate = self._translating[key] = self._translators[engine](model.block_size)
        try:
            changes, told_rank = translate(request.body)
        except MALFORMED as error:
            raise InvalidRequest(
                f"the body is no batch of events of {engine}: {error}", param="body"
            ) from None
        dp_rank = rank if rank is not None else told_rank or 0
        return self._take(model, worker, [PostedEvent(change, dp_rank) for change in changes])

    def _take(self, model: Standalone, worker: InstanceId, events: Sequence[PostedEvent]) -> Response:
        unknown_before = model.posted.stats.num_unknown_ranks
        try:
            num_taken = model.post(worker, events)
        except EventsMissed as missed:
            body = {
                "error": {"message": str(missed), "type": "events_missed", "code": "events_missed"},
                "expected": {"epoch": missed.epoch, "event_id": missed.due_id},
            }
            return _json(body, 409)
        num_unknown = model.posted.stats.num_unknown_ranks - unknown_before
        return _json({"taken": num_taken - num_unknown, "of_unknown_ranks": num_unknown})

    async def _put_blocks(self, request: HttpRequest) -> Response:
        _, model, worker = self._worker_of(request)
        posted = read(request.body, BlocksToPost)
        model.replace_blocks(worker, posted.by_place(), posted.epoch, posted.next_id)
        return _json({"blocks": sum(each.num_blocks for each in model.posted.digests(worker))})

    async def _post_load(self, request: HttpRequest) -> Response:
        _, model, worker = self._worker_of(request)
        model.on_report(LoadReport(worker, read(request.body, LoadToPost).load()))
        return _json({})

    # --- decisions

    async def _query(self, request: HttpRequest) -> Response:
        _, choice, _ = self._choose(request)
        return _json(placed(choice))

    async def _explain(self, request: HttpRequest) -> Response:
        question = read(request.body, Question)
        model = self._model(question.model)
        rows = model.explain(question.request(model.block_size), list(map(InstanceId, question.excluded)))
        return _json({"candidates": rows})

    async def _route(self, request: HttpRequest) -> Response:
        return _json(self._book(*self._choose(request)), 201)

    async def _reserve(self, request: HttpRequest) -> Response:
        """At a worker that the caller has chosen."""
        model, choice, question = self._choose(request)
        if question.worker is None:
            raise InvalidRequest("name the worker, or let /v1/route choose one", param="worker")
        return _json(self._book(model, choice, question), 201)

    def _choose(self, request: HttpRequest) -> tuple[Standalone, Choice, Question]:
        question = read(request.body, Question)
        model = self._model(question.model)
        excluded = list(map(InstanceId, question.excluded))
        choice = model.choose(question.request(model.block_size), excluded)
        if choice.is_saturated and question.refuse_saturated:
            raise Overloaded("every eligible worker is at its limit: retry later", queue="workers")
        return model, choice, question

    def _book(self, model: Standalone, choice: Choice, question: Question) -> Placed:
        reservation = model.reserve(choice, question.ttl_s)
        return placed(choice, reservation.id, question.ttl_s)

    # --- reservations

    async def _begun(self, request: HttpRequest) -> Response:
        posted = read(request.body, BegunToPost)
        model, reservation_id = self._reserved(request)
        model.begun(reservation_id, posted.cached_tokens)
        return _json({})

    async def _renew(self, request: HttpRequest) -> Response:
        posted = read(request.body, RenewalToPost)
        model, reservation_id = self._reserved(request)
        model.renew(reservation_id, posted.ttl_s)
        return _json({"ttl_s": posted.ttl_s})

    async def _free(self, request: HttpRequest) -> Response:
        end = read(request.body, EndToPost)
        usage = None
        if end.completion_tokens is not None:
            usage = Usage(end.prompt_tokens, end.completion_tokens, end.cached_tokens)
        model, reservation_id = self._reserved(request)
        model.free(reservation_id, usage, end.worker_outcome)
        return _json({})

    # --- for people

    async def _loads(self, request: HttpRequest) -> Response:
        return _json(
            {
                name: {"reservations": model.num_reservations, "places": model.loads()}
                for name, model in self._asked_models(request).items()
            }
        )

    async def _dump(self, request: HttpRequest) -> Response:
        """Counts and digests; of one worker, with `hashes=true`, the blocks themselves."""
        worker = request.query.get("worker")
        if worker is not None and request.query.get("hashes") in ("1", "true"):
            return self._dump_worker(request, InstanceId(worker))
        return _json(
            {
                name: {
                    "index_bytes": model.posted.index.num_bytes,
                    "index_blocks": model.posted.index.num_blocks,
                    "workers": {
                        each: model.posted.digests(each)
                        for each in sorted(model.workers)
                        if worker is None or each == worker
                    },
                }
                for name, model in self._asked_models(request).items()
            }
        )

    def _dump_worker(self, request: HttpRequest, worker: InstanceId) -> Response:
        model = self._model(request.query.get("model", DEFAULT_MODEL))
        if worker not in model.workers:
            raise NotFound(f"there is no worker {worker!r}", kind="worker", name=worker)
        held = [
            {
                "dp_rank": each.dp_rank,
                "tier": each.tier,
                "num_blocks": each.num_blocks,
                "digest": each.digest,
                "hashes": _base64(model.posted.contents(worker, each.dp_rank, each.tier)),
            }
            for each in model.posted.digests(worker)
        ]
        return _json({"worker": worker, "blocks": held})

    async def _health(self, request: HttpRequest) -> Response:
        workers = sum(len(model.workers) for model in self.models.values())
        return _json({"status": "ok", "models": len(self.models), "workers": workers})

    async def _metrics(self, request: HttpRequest) -> Response:
        if self._show_metrics is None:
            raise NotFound("there are no metrics here", kind="path", name="/metrics")
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
        """Whichever model it is of. NotFound for one that is over."""
        reservation_id = request.params["reservation"]
        for model in self.models.values():
            if model.has_reservation(reservation_id):
                return model, reservation_id
        raise NotFound(
            f"there is no reservation {reservation_id[:64]!r}: it was freed, its time is over, or its worker is gone",
            kind="reservation",
            name=reservation_id,
        )

    def _asked_models(self, request: HttpRequest) -> dict[str, Standalone]:
        wanted = request.query.get("model")
        return dict(sorted(self.models.items())) if wanted is None else {wanted: self._model(wanted)}

    def _worker_of(self, request: HttpRequest) -> tuple[str, Standalone, InstanceId]:
        name = request.query.get("model", DEFAULT_MODEL)
        model = self._model(name)
        worker = InstanceId(request.params["worker"])
        if worker not in model.workers:
            raise NotFound(f"there is no worker {worker!r}: register it first", kind="worker", name=worker)
        return name, model, worker


def _json(answer: Any, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(answer))


def _base64(hashes: Sequence[int]) -> str:
    return base64.b64encode(packed(sorted(hashes))).decode()


def _number(request: HttpRequest, name: str) -> int | None:
    text = request.query.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise InvalidRequest(f"{name} must be a whole number", param=name)
    return int(text)


def _not_for_web_pages(handler: Handler) -> Handler:
    # Loopback is no shield from a browser on the same machine: any page may post to it. Browsers say so.
    async def guarded(request: HttpRequest) -> Any:
        if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") != "none":
            return _WEB_PAGE
        return await handler(request)

    return guarded
