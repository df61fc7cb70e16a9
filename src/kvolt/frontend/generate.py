"""One request for text, from a typed body to an answer: what chat and completions do alike.

Validation and preprocessing come before anything is sent; then each prompt is a journey, and its tokens
go straight into the answer. An error before the first event becomes a real status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from kvolt.core.card import ModelCard
from kvolt.core.errors import InvalidRequest, KvoltError
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling
from kvolt.frontend.admin.trace_recorder import TraceRecorder
from kvolt.frontend.admission import Admission
from kvolt.frontend.answers.answer import Answer, Plan
from kvolt.frontend.answers.live import LiveAnswer, TokenFan
from kvolt.frontend.answers.whole import WholeAnswer
from kvolt.frontend.filters import to_takers
from kvolt.frontend.metrics.edge_metrics import FrontendMetrics
from kvolt.frontend.metrics.request_record import RequestRecord
from kvolt.frontend.models import Model, Models
from kvolt.frontend.openai_api.checks import check_vocabulary
from kvolt.frontend.openai_api.decoding import SMALL_BODY_BYTES, Parsed
from kvolt.frontend.openai_api.generation import (
    GenerationOptions,
    chat_options,
    completion_options,
    in_clients_words,
    prompts_of,
)
from kvolt.frontend.openai_api.headers import RequestHints, check_json, hints
from kvolt.frontend.openai_api.prompt_embeds import PromptEmbeds
from kvolt.frontend.openai_api.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from kvolt.frontend.openai_api.serializer import ChatWording, CompletionWording, Wording
from kvolt.frontend.openai_api.templating import TemplateInput, template_input
from kvolt.frontend.parsers.chain import ParserChain
from kvolt.frontend.parsers.guided import NamedToolParser, RequiredToolParser
from kvolt.frontend.query import check_one, query_body
from kvolt.frontend.roles import with_roles
from kvolt.frontend.tokenization.embedded import embedded_prompts, stand_ins
from kvolt.frontend.tokenization.off_loop import INLINE_LOGPROBS, INLINE_TOKENS, OffLoop
from kvolt.frontend.tokenization.preprocess import AskedChat, Reading
from kvolt.frontend.worker_request import (
    PROMPT_EMBEDS,
    VLLM_XARGS,
    build_request,
    check_prompt_logprobs,
    too_long,
)
from kvolt.journey.journey import Journey, Receiver
from kvolt.runtime.clock import Clock, new_id
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.http.server import HttpRequest, Response, WrittenResponse
from kvolt.runtime.http.writer import ResponseWriter
from kvolt.runtime.logs import bind
from kvolt.runtime.runtime import Runtime

log = logging.getLogger(__name__)

T = TypeVar("T", ChatRequest, CompletionRequest)

_COMPLETION_TOKENS = 16
"""Of a completion that names no limit, as OpenAI's and vLLM's are; a chat may take what the context has, or what the
model's card says."""

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set about answers."""

    strict_fields: bool = False
    """Refuse fields that nobody knows; else they are named in a header."""
    hold_headers_s: float = 5.0
    """How long a stream's headers wait for the first token, so that an early error gets its own status."""
    request_timeout_s: float = 600.0
    max_priority: int | None = None
    """The highest that a client may ask for."""


@dataclass(slots=True)
class _Asked:
    """A request on its way to an answer."""

    http: HttpRequest
    body: GenerationRequest
    model: Model
    hints: RequestHints
    options: GenerationOptions
    wording: Wording
    record: RequestRecord
    request_id: str
    headers: dict[str, str]
    prompts: list[tuple[int, ...]]
    is_large: bool = False
    """Its body was parsed off the loop, and what takes time in proportion to it stays off."""
    given: TemplateInput | None = None
    """What a chat's template is given."""
    prompt_text: str = ""
    """The rendered prompt of a chat."""
    texts: list[str] | None = None
    """The prompts of a completion, where they came as text."""
    embeds: list[PromptEmbeds] | None = None
    """The same, where they came as vectors."""

    @property
    def param(self) -> str:
        """What the client calls the prompt."""
        if isinstance(self.body, ChatRequest):
            return "messages"
        return "prompt" if self.embeds is None else PROMPT_EMBEDS

    def warn(self, text: str) -> None:
        known = self.headers.get("x-kvolt-warning")
        self.headers["x-kvolt-warning"] = f"{known}; {text}" if known else text


class Generation:
    """The handlers of the two endpoints."""

    def __init__(
        self,
        runtime: Runtime,
        models: Models,
        admission: Admission,
        metrics: FrontendMetrics,
        options: GenerateOptions,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self._models = models
        self._admission = admission
        self._metrics = metrics
        self._options = options
        self._recorder = recorder
        self._clock: Clock = runtime.ports.clock
        self.off_loop = OffLoop(runtime.ports.blocking)
        self._rng = runtime.ports.rng
        self._loop = asyncio.get_running_loop()
        self._fan = TokenFan(self._clock.monotonic, metrics.stages["detokenize"].observe)
        limits = runtime.options.deadlines
        self._deadlines = Deadlines(
            connect_s=limits.connect_s,
            first_s=min(limits.first_s, options.request_timeout_s),
            between_s=limits.between_s,
            total_s=options.request_timeout_s,
            stall_s=limits.stall_s,
        )

    async def chat(self, http: HttpRequest) -> Response | WrittenResponse:
        with self._record("chat_completions") as record:
            check_json(http.headers)
            parsed = await self._parse(http, parse_chat)
            body = parsed.request
            wording = ChatWording(self._new_call_id, body.return_tokens_as_token_ids or False)
            asked = await self._begin(http, parsed, wording, record, chat_options)
            await self._prepare_chat(asked, body)
            return await self._answer(asked)

    async def complete(self, http: HttpRequest) -> Response | WrittenResponse:
        with self._record("completions") as record:
            check_json(http.headers)
            parsed = await self._parse(http, parse_completion)
            body = parsed.request
            wording = CompletionWording(body.return_tokens_as_token_ids or False)
            asked = await self._begin(http, parsed, wording, record, completion_options)
            await self._prepare_completion(asked, body)
            record.stage("tokenize")
            return await self._answer(asked)

    # --- before anything is sent

    async def _parse(self, http: HttpRequest, parse: Callable[[bytes], Parsed[T]]) -> Parsed[T]:
        body, http.body = http.body, b""  # megabytes perhaps, and the answer may take minutes
        if len(body) <= SMALL_BODY_BYTES:
            return parse(body)
        return await self.off_loop.run(lambda: parse(body))

    async def _begin(
        self,
        http: HttpRequest,
        parsed: Parsed[Any],
        wording: Wording,
        record: RequestRecord,
        options_of: Callable[[Any, Sampling], GenerationOptions],
    ) -> _Asked:
        body: GenerationRequest = parsed.request
        unknown = parsed.unknown
        record.streams = bool(body.stream)
        model = self._models.get(body.model)
        record.of_model(model.card.name)
        said = with_roles(model, hints(http.headers, body.nvext, body.cache_salt, body.priority))
        headers: dict[str, str] = {}
        if unknown:
            names = ", ".join(unknown)
            if self._options.strict_fields:
                raise InvalidRequest(f"unknown fields: {names}", param=unknown[0], code="unknown_parameter")
            headers["x-kvolt-warning"] = f"ignored unknown fields: {names}"
        record.on_end = self._admission.enter()
        self._admission.check(model.card.name, model.candidates(), model.capacity.max_batch_tokens)

        def checked_options() -> GenerationOptions:
            check_vocabulary(body, model.processor.vocabulary.size)
            return options_of(body, model.defaults)

        options = await self.off_loop.run(checked_options) if parsed.is_large else checked_options()
        if options.vllm_xargs:
            said = to_takers(model, said, VLLM_XARGS)
        record.stage("parse")
        # A client may use its own id for several requests at once; ours must tell them apart.
        request_id = http.id if said.request_id is None else new_id(self._rng)
        asked = _Asked(
            http, body, model, said, options, wording, record, request_id, headers, [], parsed.is_large
        )
        self._cap_priority(asked)
        return asked

    def _cap_priority(self, asked: _Asked) -> None:
        routing, most = asked.hints.routing, self._options.max_priority
        if most is not None and routing.priority > most:
            asked.warn(f"priority {routing.priority} counts as {most}, the highest that is allowed here")
            routing = msgspec.structs.replace(routing, priority=most)
            asked.hints = msgspec.structs.replace(asked.hints, routing=routing)

    async def _prepare_chat(self, asked: _Asked, body: ChatRequest) -> None:
        processor = asked.model.processor
        tools = asked.options.tools
        if asked.is_large:
            given = await self.off_loop.run(lambda: template_input(body, tools, is_large=True))
        else:
            given = template_input(body, tools)
        asked.given = given
        if asked.hints.token_data is not None:
            asked.prompts.append(asked.hints.token_data)
            return
        if given.tools and not processor.takes_tools:
            asked.warn("the model's chat template has no place for tools")
        if asked.hints.use_raw_prompt:
            asked.prompt_text = "".join(_plain_text(message.get("content")) for message in given.messages)
        else:
            asked.prompt_text = await processor.render(given)
        asked.record.stage("template")
        asked.prompts = await processor.encode([asked.prompt_text], "messages", bool(body.add_special_tokens))
        asked.record.stage("tokenize")

    async def _prepare_completion(self, asked: _Asked, body: CompletionRequest) -> None:
        card, most = asked.model.card, asked.options.max_tokens or 1
        if body.prompt_embeds is not None:
            asked.hints = to_takers(asked.model, asked.hints, PROMPT_EMBEDS)
            asked.embeds = await embedded_prompts(body.prompt_embeds, card, most, self.off_loop)
            asked.prompts = [stand_ins(each) for each in asked.embeds]
            return
        given = asked.hints.token_data
        prompts = prompts_of(body) if given is None else [given]
        if isinstance(prompts[0], str):
            asked.texts = [str(prompt) for prompt in prompts]
            special = body.add_special_tokens is not False
            asked.prompts = await asked.model.processor.encode(asked.texts, "prompt", special)
        else:
            for prompt in prompts:
                _check_length(card, prompt, most)
            asked.prompts = [tuple(prompt) for prompt in cast("list[Sequence[int]]", prompts)]
        for prompt in asked.prompts:
            _check_length(card, prompt, most)

    def _requests(self, asked: _Asked) -> list[Request]:
        several = len(asked.prompts) > 1
        requests = []
        sampling = asked.options.sampling
        check_prompt_logprobs(sum(map(len, asked.prompts)), sampling.prompt_logprobs, sampling.num_choices)
        for number, prompt in enumerate(asked.prompts):
            request_id = f"{asked.request_id}-{number}" if several else asked.request_id
            requests.append(
                build_request(
                    RequestId(request_id),
                    asked.model.card,
                    prompt,
                    asked.options,
                    asked.hints,
                    asked.param,
                    _default_max_tokens(asked, prompt),
                    asked.model.lora,
                    None if asked.embeds is None else asked.embeds[number],
                )
            )
        return requests

    # --- the answer

    async def _answer(self, asked: _Asked) -> Response | WrittenResponse:
        record = asked.record
        num_tokens = sum(map(len, asked.prompts))
        if num_tokens <= INLINE_TOKENS:
            requests, plan = self._requests(asked), self._plan(asked)
        else:
            requests, plan = await self.off_loop.run(lambda: (self._requests(asked), self._plan(asked)))
        record.prompt_tokens(num_tokens)
        if asked.hints.routing.query_only:
            return await self._query(asked, plan, requests)
        if asked.body.stream:
            record.hand_over()

            async def produce(writer: ResponseWriter) -> None:
                with record:
                    await self._stream(asked, plan, requests, writer)

            return WrittenResponse(produce, headers={**_SSE_HEADERS, **asked.headers})
        answer = WholeAnswer(plan, self._new_call_id, self._fan)
        try:
            await self._run(asked, answer, answer.receivers, requests, answer.done)
            is_long = _num_logprobs(asked.options.sampling, num_tokens, answer) > INLINE_LOGPROBS
            body = await self.off_loop.run(answer.body) if is_long else answer.body()
            return Response(200, body, {**asked.headers, **plan.late_headers()})
        finally:
            _count(record, answer)
            answer.close()

    async def _query(self, asked: _Asked, plan: Plan, requests: list[Request]) -> Response:
        request = check_one(requests, asked.param)
        streams = bool(asked.body.stream)
        timeout_s = self._time_left(asked).total_s
        body = await query_body(plan, asked.model.road, request, timeout_s, streams)
        if not streams:
            return Response(200, body, asked.headers)
        return Response(200, body, {**_SSE_HEADERS, **asked.headers}, "text/event-stream")

    async def _stream(
        self, asked: _Asked, plan: Plan, requests: list[Request], writer: ResponseWriter
    ) -> None:
        answer = LiveAnswer(plan, writer, self._fan)
        patience = self._loop.call_later(self._options.hold_headers_s, answer.open)
        try:
            await self._run(asked, answer, answer.receivers, requests, answer.done)
        except KvoltError as error:
            if not writer.head_sent:
                raise
            answer.fail(error)  # the headers could wait no longer, so it goes into the stream
        finally:
            asked.record.failure = answer.failure
            patience.cancel()
            _count(asked.record, answer)
            answer.close()

    async def _run(
        self,
        asked: _Asked,
        answer: Answer,
        receivers: Sequence[Receiver],
        requests: list[Request],
        done: asyncio.Future[None],
    ) -> None:
        """Until the answer is complete. However it ends, nothing of it runs afterwards."""
        asked.http.on_disconnect(answer.cancel)
        deadlines = self._time_left(asked)
        journeys = [
            Journey(asked.model.road, request, receiver, deadlines)
            for request, receiver in zip(requests, receivers, strict=True)
        ]
        for journey in journeys:
            answer.add_journey(journey)
        recorder = self._recorder
        recorded = recorder.arrived(asked.record.started_at, requests) if recorder is not None else None
        try:
            with bind(request_id=asked.http.id, traceparent=asked.hints.traceparent):
                if len(journeys) == 1:
                    await journeys[0].begin()
                else:
                    await _begin_all(journeys)
            asked.record.stage("route")
            await done
        except InvalidRequest as error:
            raise in_clients_words(error, asked.body, asked.options) from error
        finally:
            answer.cancel()
            if recorded is not None:
                recorded.ended([state.choice.num_tokens for state in answer.states])

    def _time_left(self, asked: _Asked) -> Deadlines:
        """The request's time runs since it came, not since it was ready to be sent."""
        deadlines = self._deadlines
        total_s = deadlines.total_s
        if asked.hints.deadline_s is not None:
            total_s = min(asked.hints.deadline_s, total_s)
        left_s = max(total_s - asked.record.elapsed_s, 0.0)
        return msgspec.structs.replace(deadlines, total_s=left_s, first_s=min(deadlines.first_s, left_s))

    def _plan(self, asked: _Asked) -> Plan:
        options, body = asked.options, asked.body
        streamed = body.stream_options
        echo: list[str] = []
        if isinstance(body, CompletionRequest) and body.echo:
            decode = asked.model.processor.vocabulary.decode
            echo = asked.texts or [decode(prompt, options.skip_special_tokens) for prompt in asked.prompts]
        plan = Plan(
            request_id=asked.request_id,
            created=int(self._clock.wall()),
            model=body.model,
            wording=asked.wording,
            vocabulary=asked.model.processor.vocabulary,
            prompts=asked.prompts,
            num_choices=options.sampling.num_choices,
            stop=options.stop,
            include_stop=options.include_stop,
            min_tokens=options.min_tokens,
            skip_special_tokens=options.skip_special_tokens,
            with_logprobs=options.sampling.logprobs is not None,
            with_prompt_logprobs=body.prompt_logprobs is not None,
            echo=echo,
            include_usage=bool(streamed and streamed.include_usage),
            continuous_usage=bool(streamed and streamed.continuous_usage_stats),
            extra_fields=frozenset(asked.hints.extra_fields),
            annotations=_annotations(asked),
            timing=asked.record.timing,
            late_headers=asked.record.timing_headers if asked.hints.timing else dict,
            observer=asked.record,
            now=self._clock.monotonic,
        )
        if isinstance(body, ChatRequest):
            reading = self._reading(asked)
            plan.new_parser = reading.new_parser
            plan.skip_special_tokens = options.skip_special_tokens and not reading.shows_special
            plan.named_call = _names_function(options)
        return plan

    def _reading(self, asked: _Asked) -> Reading:
        options = asked.options
        max_calls = None if options.parallel_tool_calls else 1
        if options.tool_choice == "required":  # a grammar holds the model to calls from the start
            return Reading(lambda: ParserChain(None, RequiredToolParser(), max_calls=max_calls))
        if _names_function(options):
            return Reading(lambda: NamedToolParser(options.tool_choice))
        assert asked.given is not None, "a chat"
        return asked.model.processor.reading(
            AskedChat(asked.given, asked.prompt_text, asked.prompts[0], bool(options.tools), max_calls)
        )

    def _record(self, endpoint: str) -> RequestRecord:
        return RequestRecord(self._metrics, endpoint, self._clock.monotonic)

    def _new_call_id(self) -> str:
        return f"call_{new_id(self._rng)[:24]}"


def _default_max_tokens(asked: _Asked, prompt: tuple[int, ...]) -> int:
    """Longest answer to a prompt whose request names no limit."""
    if not isinstance(asked.body, ChatRequest):
        return _COMPLETION_TOKENS
    room, of_model = asked.model.most_tokens - len(prompt), asked.model.card.default_max_tokens
    return room if of_model is None else min(room, max(of_model, asked.options.min_tokens))


def _plain_text(content: Any) -> str:
    """A message's text, whichever form it has."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or () if isinstance(part, dict))


async def _begin_all(journeys: list[Journey]) -> None:
    """All prompts of a batch. The first that cannot begin speaks for all; the rest are cancelled by the caller."""
    results = await asyncio.gather(*(journey.begin() for journey in journeys), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _num_logprobs(sampling: Sampling, num_prompt_tokens: int, answer: WholeAnswer) -> int:
    """Log probabilities that a whole answer has, with all alternatives."""
    total = 0
    if sampling.logprobs is not None:
        total += sum(state.choice.num_tokens for state in answer.states) * (sampling.logprobs + 1)
    if sampling.prompt_logprobs is not None:
        total += num_prompt_tokens * sampling.num_choices * (sampling.prompt_logprobs + 1)
    return total


def _check_length(card: ModelCard, prompt: Sized, num_wanted: int) -> None:
    if len(prompt) >= card.context_length:
        raise too_long(card, len(prompt), num_wanted, "prompt")


def _names_function(options: GenerationOptions) -> bool:
    return options.tool_choice not in ("none", "auto", "required")


def _count(record: RequestRecord, answer: Answer) -> None:
    record.output_tokens = sum(state.choice.num_tokens for state in answer.states)
    record.cached_tokens = answer.cached_tokens


def _annotations(asked: _Asked) -> list[tuple[str, object]]:
    values: Mapping[str, Callable[[], object]] = {
        "request_id": lambda: asked.request_id,
        "formatted_prompt": lambda: asked.prompt_text,
        "token_ids": lambda: asked.prompts[0] if len(asked.prompts) == 1 else asked.prompts,
    }
    return [(name, values[name]()) for name in asked.hints.annotations if name in values]
