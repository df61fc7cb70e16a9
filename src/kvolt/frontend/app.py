"""The HTTP edge, thin: models, completions and chat completions, whole and streamed."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvolt.core.delta import Delta, Usage
from kvolt.core.errors import InvalidRequest, KvoltError
from kvolt.core.hashing import SequenceHasher
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.frontend import openai
from kvolt.frontend.models import Model, Models
from kvolt.frontend.text import Decoder
from kvolt.runtime.call import Deadlines, ResponseStream
from kvolt.runtime.clock import Clock, new_id
from kvolt.runtime.http import HttpRequest, Response, Routes, StreamingResponse, error_response
from kvolt.runtime.logs import bind
from kvolt.runtime.runtime import Runtime

_DEFAULT_MAX_TOKENS = 128
_ENCODE_INLINE_CHARACTERS = 16 * 1024
_ENCODE_TIMEOUT_S = 30.0
_DONE = b"data: [DONE]\n\n"
_SSE_HEADERS = {"cache-control": "no-cache"}

log = logging.getLogger(__name__)

_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Answer:
    """What is needed to word one answer."""

    request: Request
    model: Model
    shape: openai.Shape
    created: int
    include_usage: bool = False
    decoders: dict[int, Decoder] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.shape.prefix + self.request.request_id

    def text(self, delta: Delta) -> str:
        decoder = self.decoders.get(delta.index)
        if decoder is None:
            decoder = self.decoders[delta.index] = self.model.codec.decoder()
        if delta.usage is not None:
            self.usage[delta.index] = delta.usage
        return decoder.step(delta.token_ids)

    def usage_body(self) -> dict[str, int]:
        prompt = len(self.request.token_ids)
        completion = sum(usage.completion_tokens for usage in self.usage.values())
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = self.model.card.name
        return {"id": self.id, "object": kind, "created": self.created, "model": name, "choices": choices}


class FrontendApp:
    """The handlers; `routes` is what an HttpServer serves."""

    def __init__(self, runtime: Runtime, models: Models, request_timeout_s: float) -> None:
        self._runtime = runtime
        self._models = models
        self._clock: Clock = runtime.ports.clock
        limits = runtime.options.deadlines
        self._deadlines = Deadlines(
            connect_s=limits.connect_s,
            first_s=min(limits.first_s, request_timeout_s),
            between_s=limits.between_s,
            total_s=request_timeout_s,
        )

    def routes(self) -> Routes:
        routes = Routes()
        routes.add("GET", "/v1/models", self._list_models)
        routes.add("POST", "/v1/completions", self._complete)
        routes.add("POST", "/v1/chat/completions", self._chat)
        routes.add("GET", "/health", self._health)
        routes.add("GET", "/live", self._live)
        routes.add("GET", "/ready", self._health)
        return routes

    async def _list_models(self, request: HttpRequest) -> Response:
        data = [
            {"id": model.card.name, "object": "model", "created": 0, "owned_by": "kvolt"}
            for model in self._models.ready()
        ]
        return Response(200, _json({"object": "list", "data": data}))

    async def _health(self, request: HttpRequest) -> Response:
        """Ready means routable: 503 until a model could be served now."""
        ready = self._models.ready()
        status = {
            "status": "ready" if ready else "no_models",
            "models": [model.card.name for model in ready],
            "workers": {model.card.name: len(model.client.candidates()) for model in ready},
        }
        return Response(200 if ready else 503, _json(status))

    async def _live(self, request: HttpRequest) -> Response:
        return Response(200, b'{"status":"live"}')

    async def _complete(self, http: HttpRequest) -> Response | StreamingResponse:
        asked = openai.parse_completion(http.body)
        model = self._models.get(asked.model)
        if isinstance(asked.prompt, str):
            prompt = await self._encode(model, asked.prompt, "prompt")
        else:
            prompt = tuple(asked.prompt)
            if prompt and max(prompt) >= model.codec.vocabulary_size:
                raise InvalidRequest(
                    f"a token id is over the vocabulary of {model.codec.vocabulary_size}", param="prompt"
                )
        return await self._answer(http, asked, model, prompt, asked.max_tokens, openai.CompletionShape())

    async def _chat(self, http: HttpRequest) -> Response | StreamingResponse:
        asked = openai.parse_chat(http.body)
        model = self._models.get(asked.model)
        prompt = await self._encode(model, model.codec.render(asked.messages), "messages")
        max_tokens = asked.max_completion_tokens
        if max_tokens is None:
            max_tokens = asked.max_tokens
        return await self._answer(http, asked, model, prompt, max_tokens, openai.ChatShape())

    async def _encode(self, model: Model, text: str, param: str) -> tuple[int, ...]:
        """Tokens of a text: a long one in a thread, since the loop carries other people's tokens."""
        if len(text) > model.codec.most_characters:
            raise InvalidRequest(
                f"{len(text)} characters cannot fit into a context of {model.card.context_length} tokens",
                param=param,
            )
        if len(text) <= _ENCODE_INLINE_CHARACTERS:
            return model.codec.encode(text)
        return await self._runtime.ports.blocking.run(lambda: model.codec.encode(text), _ENCODE_TIMEOUT_S)

    async def _answer(
        self,
        http: HttpRequest,
        asked: openai.AnyRequest,
        model: Model,
        prompt: tuple[int, ...],
        max_tokens: int | None,
        shape: openai.Shape,
    ) -> Response | StreamingResponse:
        request_id = RequestId(new_id(self._runtime.ports.rng))
        request = _build_request(request_id, asked, model, prompt, max_tokens)
        include_usage = asked.stream_options is not None and asked.stream_options.include_usage
        answer = _Answer(request, model, shape, int(self._clock.wall()), include_usage)
        with bind(request_id=request_id, traceparent=http.headers.get("traceparent")):
            deltas = await model.journey.begin(request, self._deadlines)
        headers = {"x-request-id": request_id}
        if asked.stream:
            return StreamingResponse(
                body=_stream(answer, deltas),
                headers={**_SSE_HEADERS, **headers},
                content_type="text/event-stream",
            )
        return Response(200, _json(await _whole(answer, deltas)), headers)


def _build_request(
    request_id: RequestId,
    asked: openai.AnyRequest,
    model: Model,
    prompt: tuple[int, ...],
    max_tokens: int | None,
) -> Request:
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    room = model.card.context_length - len(prompt)
    wanted = max_tokens if max_tokens is not None else min(_DEFAULT_MAX_TOKENS, max(room, 1))
    if wanted > room:
        raise InvalidRequest(
            f"this model's context is {model.card.context_length} tokens; the prompt has {len(prompt)} and "
            f"{wanted} more were asked for",
            param="max_tokens",
        )
    block_size = model.card.block_size
    hasher = SequenceHasher(block_size)
    hasher.extend(prompt)
    return Request(
        request_id=request_id,
        model=model.card.name,
        token_ids=prompt,
        block_size=block_size,
        local_hashes=tuple(hasher.local),
        sequence_hashes=tuple(hasher.sequence),
        stop=StopConditions(max_tokens=wanted),
        sampling=Sampling(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=asked.seed,
            num_choices=asked.n or 1,
        ),
    )


async def _whole(answer: _Answer, deltas: ResponseStream) -> dict[str, Any]:
    texts: dict[int, list[str]] = {}
    finishes: dict[int, str] = {}
    async with deltas:
        async for delta in deltas:
            texts.setdefault(delta.index, []).append(answer.text(delta))
            if delta.finish is not None:
                finishes[delta.index] = delta.finish.value
    choices = [
        answer.shape.choice(index, "".join(texts[index]), finishes.get(index)) for index in sorted(texts)
    ]
    return {**answer.envelope(answer.shape.whole, choices), "usage": answer.usage_body()}


async def _stream(answer: _Answer, deltas: ResponseStream) -> AsyncIterator[bytes]:
    """One event per delta; what is ready together leaves in one write. An error becomes the last event."""
    async with deltas:
        try:
            while batch := await deltas.batch():
                yield b"".join([_event(answer, delta) for delta in batch])
        except KvoltError as error:
            if not answer.decoders:
                raise  # nothing was sent yet: the client gets a real status
            log.warning("stream %s ended early: %s", answer.request.request_id, error.message)
            yield b"data: " + error_response(error).body + b"\n\n"
            return
        if answer.include_usage:
            last = {**answer.envelope(answer.shape.chunk, []), "usage": answer.usage_body()}
            yield b"data: " + _json(last) + b"\n\n"
        yield _DONE


def _event(answer: _Answer, delta: Delta) -> bytes:
    first = delta.index not in answer.decoders
    text = answer.text(delta)
    finish = delta.finish.value if delta.finish is not None else None
    choice = answer.shape.delta(delta.index, text, finish, first)
    return b"data: " + _json(answer.envelope(answer.shape.chunk, [choice])) + b"\n\n"
