"""Handlers of chat and completions, from the HTTP request to the response.

A request is validated and preprocessed before anything is sent to a worker. Then each prompt runs as a journey that
writes its tokens into the answer. An error before the first event sets the HTTP status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any, cast

import msgspec

from kvolt.core.card import ModelCard
from kvolt.core.errors import InvalidRequest, KvoltError
from kvolt.core.request import Request
from kvolt.frontend.admin.trace_recorder import TraceRecorder
from kvolt.frontend.admission import Admission
from kvolt.frontend.answers.answer import Answer, AnswerSpec, journey_fields
from kvolt.frontend.answers.streaming import StreamingAnswer, TokenFanOut
from kvolt.frontend.answers.whole import WholeAnswer
from kvolt.frontend.generation_context import (
    GenerationContext,
    build_answer_spec,
    build_requests,
    embedded_prompts,
    placeholder_tokens,
)
from kvolt.frontend.metrics.edge_metrics import FrontendMetrics
from kvolt.frontend.metrics.request_record import RequestRecord
from kvolt.frontend.model import Model, require_extra, with_allowed_by_role
from kvolt.frontend.models import Models
from kvolt.frontend.off_loop import INLINE_LOGPROBS, INLINE_TOKENS, OffLoop
from kvolt.frontend.openai_api.checks import check_vocabulary, parse_chat, parse_completion
from kvolt.frontend.openai_api.decoding import Parsed
from kvolt.frontend.openai_api.generation import (
    GenerationDefaults,
    GenerationOptions,
    chat_options,
    completion_options,
    list_prompts,
    with_client_param,
)
from kvolt.frontend.openai_api.headers import parse_hints
from kvolt.frontend.openai_api.requests import ChatRequest, CompletionRequest, GenerationRequest
from kvolt.frontend.openai_api.serializer import ChatSerializer, CompletionSerializer, ResponseSerializer
from kvolt.frontend.openai_api.templating import build_template_input
from kvolt.frontend.query import check_one, query_body
from kvolt.frontend.request_body import BodyParser
from kvolt.frontend.tenants.access import AccessGuard, caller_of
from kvolt.frontend.worker_request import (
    PROMPT_EMBEDS,
    VLLM_XARGS,
    too_long,
)
from kvolt.journey.journey import Journey
from kvolt.runtime.clock import Clock, new_id
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.http.server import HttpLimits, HttpRequest, Response, WrittenResponse
from kvolt.runtime.http.writer import ResponseWriter
from kvolt.runtime.logs import bind
from kvolt.runtime.runtime import Runtime

log = logging.getLogger(__name__)

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Operator settings of request handling."""

    strict_fields: bool = False
    """Reject requests with unknown fields; otherwise list them in the `x-kvolt-warning` header."""
    hold_headers_s: float = 5.0
    """Maximum time to hold a stream's headers until the first token, so that an early error sets the status."""
    request_timeout_s: float = 600.0
    max_priority: int | None = None
    """Highest priority that a client may request; None: unlimited."""


class Generation:
    """Handlers of /v1/chat/completions and /v1/completions."""

    def __init__(
        self,
        runtime: Runtime,
        models: Models,
        admission: Admission,
        metrics: FrontendMetrics,
        options: GenerateOptions,
        recorder: TraceRecorder | None = None,
        max_body_bytes: int = HttpLimits().max_body_bytes,
        access: AccessGuard | None = None,
    ) -> None:
        self._models = models
        self._admission = admission
        self._metrics = metrics
        self._options = options
        self._recorder = recorder
        self.access = access
        self._clock: Clock = runtime.ports.clock
        self.off_loop = OffLoop(runtime.ports.blocking)
        self.bodies = BodyParser(self.off_loop, max_body_bytes)
        self._rng = runtime.ports.rng
        self._loop = asyncio.get_running_loop()
        self._fan = TokenFanOut(self._clock.monotonic, metrics.stages["detokenize"].observe)
        limits = runtime.options.deadlines
        self._deadlines = Deadlines(
            connect_s=limits.connect_s,
            first_s=min(limits.first_s, options.request_timeout_s),
            between_s=limits.between_s,
            total_s=options.request_timeout_s,
            stall_s=limits.stall_s,
        )

    async def chat(self, http: HttpRequest) -> Response | WrittenResponse:
        with self.new_record("chat_completions", http) as record:
            if self.access is not None:
                record.tenant = await self.access.begin(http)
            return await self._answer(await self.prepare_chat(http, record))

    async def complete(self, http: HttpRequest) -> Response | WrittenResponse:
        with self.new_record("completions", http) as record:
            if self.access is not None:
                record.tenant = await self.access.begin(http)
            return await self._answer(await self.prepare_completion(http, record))

    def find_model(self, http: HttpRequest, name: str | None) -> Model:
        """The ready model with this name, if the caller may use it."""
        if self.access is None:
            return self._models.get(name)
        return self.access.find_model(self._models, name, caller_of(http))

    # --- before anything is sent

    def new_record(self, endpoint: str, http: HttpRequest) -> RequestRecord:
        return RequestRecord(self._metrics, http.id, endpoint, self._clock.monotonic)

    async def prepare_chat(self, http: HttpRequest, record: RequestRecord) -> GenerationContext:
        """Check a chat request and turn its messages into tokens."""
        parsed = await self.bodies.parse(http, parse_chat)
        body = parsed.request
        serializer = ChatSerializer(self.new_call_id, body.return_tokens_as_token_ids or False)
        context = await self._begin_request(http, parsed, serializer, record, chat_options)
        await self._prepare_chat(context, body)
        return context

    async def prepare_completion(self, http: HttpRequest, record: RequestRecord) -> GenerationContext:
        """Check a completion request and turn its prompts into tokens."""
        parsed = await self.bodies.parse(http, parse_completion)
        body = parsed.request
        serializer = CompletionSerializer(body.return_tokens_as_token_ids or False)
        context = await self._begin_request(http, parsed, serializer, record, completion_options)
        await self._prepare_completion(context, body)
        record.stage("tokenize")
        return context

    async def _begin_request(
        self,
        http: HttpRequest,
        parsed: Parsed[Any],
        serializer: ResponseSerializer,
        record: RequestRecord,
        options_of: Callable[[Any, GenerationDefaults], GenerationOptions],
    ) -> GenerationContext:
        body: GenerationRequest = parsed.request
        unknown = parsed.unknown
        record.streams = bool(body.stream)
        model = self.find_model(http, body.model)
        record.of_model(model.card.name)
        caller = caller_of(http)
        tenant = None if caller is None else caller.tenant
        hints = with_allowed_by_role(
            model, parse_hints(http.headers, body.nvext, body.cache_salt, body.priority, tenant)
        )
        headers: dict[str, str] = {}
        if unknown:
            names = ", ".join(unknown)
            if self._options.strict_fields:
                raise InvalidRequest(f"unknown fields: {names}", param=unknown[0], code="unknown_parameter")
            headers["x-kvolt-warning"] = f"ignored unknown fields: {names}"
        record.on_end = self._admission.acquire()
        self._admission.check(model.card.name, model.candidates(), model.capacity.max_batch_tokens)

        def checked_options() -> GenerationOptions:
            check_vocabulary(body, model.processor.vocabulary.size)
            return options_of(body, model.defaults)

        options = await self.off_loop.run(checked_options) if parsed.is_large else checked_options()
        if options.vllm_xargs:
            hints = require_extra(model, hints, VLLM_XARGS)
        record.stage("parse")
        # A client may reuse its id for concurrent requests: internal ids are unique, with the client's for log lines.
        # It does not begin them, since prefixes of ids have a meaning for some engines.
        request_id = http.id if hints.request_id is None else f"{new_id(self._rng)}-{http.id}"
        context = GenerationContext(
            http, body, model, hints, options, serializer, record, request_id, headers, [], parsed.is_large
        )
        context.cap_priority(self._options.max_priority)
        return context

    async def _prepare_chat(self, context: GenerationContext, body: ChatRequest) -> None:
        processor = context.model.processor
        tools = context.options.tools
        if context.is_large:
            template_input = await self.off_loop.run(lambda: build_template_input(body, tools, is_large=True))
        else:
            template_input = build_template_input(body, tools)
        context.template_input = template_input
        if context.hints.token_data is not None:
            context.prompts.append(context.hints.token_data)
            return
        if template_input.tools and not processor.supports_tools:
            is_forced = context.options.tool_choice not in ("none", "auto")
            context.warn(
                "the model's chat template does not show the tools to the model: "
                + ("only the form of the call is forced" if is_forced else "tools ignored")
            )
        if context.hints.use_raw_prompt:
            context.prompt_text = "".join(
                _plain_text(message.get("content")) for message in template_input.messages
            )
        else:
            context.prompt_text = await processor.render(template_input)
        context.record.stage("template")
        context.prompts = await processor.encode(
            [context.prompt_text], "messages", bool(body.add_special_tokens)
        )
        context.record.stage("tokenize")

    async def _prepare_completion(self, context: GenerationContext, body: CompletionRequest) -> None:
        card, limit = context.model.card, context.options.max_tokens
        if body.prompt_embeds is not None:
            context.hints = require_extra(context.model, context.hints, PROMPT_EMBEDS)
            context.embeds = await embedded_prompts(body.prompt_embeds, card, limit, self.off_loop)
            context.prompts = [placeholder_tokens(each) for each in context.embeds]
            return
        token_data = context.hints.token_data
        prompts = list_prompts(body) if token_data is None else [token_data]
        if isinstance(prompts[0], str):
            context.texts = [str(prompt) for prompt in prompts]
            special = body.add_special_tokens is not False
            context.prompts = await context.model.processor.encode(context.texts, "prompt", special)
        else:
            for prompt in prompts:
                _check_length(card, prompt, limit)
            context.prompts = [tuple(prompt) for prompt in cast("list[Sequence[int]]", prompts)]
        for prompt in context.prompts:
            _check_length(card, prompt, limit)

    # --- the answer

    async def build(self, context: GenerationContext) -> tuple[list[Request], AnswerSpec]:
        """Worker requests of a prepared request, and the parameters of its answer."""
        num_tokens = sum(map(len, context.prompts))

        def build() -> tuple[list[Request], AnswerSpec]:
            created = int(self._clock.wall())
            return build_requests(context), build_answer_spec(context, created, self._clock.monotonic)

        built = build() if num_tokens <= INLINE_TOKENS else await self.off_loop.run(build)
        context.record.prompt_tokens(num_tokens)
        return built

    async def _answer(self, context: GenerationContext) -> Response | WrittenResponse:
        record = context.record
        requests, spec = await self.build(context)
        if record.tenant is not None:
            await context.reserve_tokens(record.tenant, requests)
        if context.hints.routing.query_only:
            return await self._query(context, spec, requests)
        if context.body.stream:
            record.hand_over()

            async def produce(writer: ResponseWriter) -> None:
                with record:
                    await self._stream(context, spec, requests, writer)

            return WrittenResponse(produce, headers={**_SSE_HEADERS, **context.headers})
        answer = WholeAnswer(spec, self.new_call_id, self._fan)
        try:
            await self.run(context, answer, requests)
            is_long = _num_logprobs(context, answer) > INLINE_LOGPROBS
            body = await self.off_loop.run(answer.body) if is_long else answer.body()
            return Response(200, body, {**context.headers, **spec.timing_headers()})
        finally:
            record_usage(record, answer)
            answer.close()

    async def _query(self, context: GenerationContext, spec: AnswerSpec, requests: list[Request]) -> Response:
        request = check_one(requests, context.param)
        streams = bool(context.body.stream)
        timeout_s = self._remaining_deadlines(context).total_s
        body = await query_body(spec, context.model.journey_context, request, timeout_s, streams)
        if not streams:
            return Response(200, body, context.headers)
        return Response(200, body, {**_SSE_HEADERS, **context.headers}, "text/event-stream")

    async def _stream(
        self,
        context: GenerationContext,
        spec: AnswerSpec,
        requests: list[Request],
        writer: ResponseWriter,
    ) -> None:
        answer = StreamingAnswer(spec, writer, self._fan)
        headers_timer = self._loop.call_later(self._options.hold_headers_s, answer.send_headers)
        try:
            await self.run(context, answer, requests)
        except KvoltError as error:
            if not writer.head_sent:
                raise
            answer.fail(error)  # the headers are sent, so the error goes into the stream
        finally:
            context.record.failure = answer.failure
            headers_timer.cancel()
            record_usage(context.record, answer)
            answer.close()

    async def run(self, context: GenerationContext, answer: Answer[Any], requests: list[Request]) -> None:
        """Run the journeys of an answer until it is complete. On return or error nothing of them is left running."""
        context.http.on_disconnect(answer.cancel)
        deadlines = self._remaining_deadlines(context)
        journeys = [
            Journey(context.model.journey_context, request, receiver, deadlines)
            for request, receiver in zip(requests, answer.receivers, strict=True)
        ]
        for journey in journeys:
            answer.add_journey(journey)
        recorder = self._recorder
        recorded = recorder.arrived(context.record.started_at, requests) if recorder is not None else None
        try:
            with bind(request_id=context.http.id, traceparent=context.hints.traceparent):
                if len(journeys) == 1:
                    await journeys[0].start()
                else:
                    await _start_all(journeys)
            context.record.stage("route")
            await answer.done
        except InvalidRequest as error:
            raise with_client_param(error, context.body, context.options) from error
        finally:
            answer.cancel()
            if recorded is not None:
                recorded.ended([state.choice.num_tokens for state in answer.states])

    def _remaining_deadlines(self, context: GenerationContext) -> Deadlines:
        """Deadlines reduced by the time since the request arrived."""
        deadlines = self._deadlines
        total_s = deadlines.total_s
        if context.hints.deadline_s is not None:
            total_s = min(context.hints.deadline_s, total_s)
        left_s = max(total_s - context.record.elapsed_s, 0.0)
        return msgspec.structs.replace(deadlines, total_s=left_s, first_s=min(deadlines.first_s, left_s))

    def new_call_id(self) -> str:
        return f"call_{new_id(self._rng)[:24]}"


def _plain_text(content: Any) -> str:
    """Text of a message's content, string or parts."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or () if isinstance(part, dict))


async def _start_all(journeys: list[Journey]) -> None:
    """Start all prompts of a batch. Raises the first error; the caller cancels the other journeys."""
    results = await asyncio.gather(*(journey.start() for journey in journeys), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _num_logprobs(context: GenerationContext, answer: WholeAnswer) -> int:
    """Number of log probabilities in the answer, alternatives included."""
    sampling, total = context.options.sampling, 0
    if sampling.logprobs is not None:
        total += sum(state.choice.num_tokens for state in answer.states) * (sampling.logprobs + 1)
    if sampling.prompt_logprobs is not None:
        num_prompt_tokens = sum(map(len, context.prompts))
        total += num_prompt_tokens * sampling.num_choices * (sampling.prompt_logprobs + 1)
    return total


def _check_length(card: ModelCard, prompt: Sized, num_output: int | None) -> None:
    if len(prompt) >= card.context_length:
        raise too_long(card, len(prompt), num_output, "prompt")


def record_usage(record: RequestRecord, answer: Answer[Any]) -> None:
    record.output_tokens = sum(state.choice.num_tokens for state in answer.states)
    record.cached_tokens = answer.cached_tokens
    record.journey_fields = partial(journey_fields, answer.journeys)  # `close` clears them
