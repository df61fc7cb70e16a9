"""State of one HTTP request for chat or completions; the worker requests and the AnswerSpec built from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvolt.core.card import ModelCard
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.frontend.answers.answer import AnswerSpec
from kvolt.frontend.metrics.request_record import RequestRecord
from kvolt.frontend.model import Model
from kvolt.frontend.off_loop import OffLoop
from kvolt.frontend.openai_api.generation import GenerationOptions
from kvolt.frontend.openai_api.headers import RequestHints
from kvolt.frontend.openai_api.prompt_embeds import PromptEmbeds, read_embeds
from kvolt.frontend.openai_api.requests import ChatRequest, CompletionRequest, GenerationRequest
from kvolt.frontend.openai_api.serializer import ResponseSerializer
from kvolt.frontend.openai_api.templating import TemplateInput
from kvolt.frontend.parsers.calls import NamedToolParser, RequiredToolParser
from kvolt.frontend.parsers.chain import ParserChain
from kvolt.frontend.tenants.access import caller_of
from kvolt.frontend.tenants.budgets import TenantRequest
from kvolt.frontend.tokenization.preprocess import ParserSpec, RenderedChat
from kvolt.frontend.worker_request import PROMPT_EMBEDS, build_request, check_prompt_logprobs, too_long
from kvolt.runtime.http.server import HttpRequest

_COMPLETION_TOKENS = 16
"""Default `max_tokens` of completions, as in OpenAI's and vLLM's APIs. For chats see `_default_max_tokens`."""


_INLINE_EMBEDS_CHARACTERS = 256 * 1024
"""Longer ones are decoded in a thread, off the event loop."""
_NO_TOKEN = 0


@dataclass(slots=True)
class GenerationContext:
    """State of one HTTP request while it is prepared and answered."""

    http: HttpRequest
    body: GenerationRequest
    model: Model
    hints: RequestHints
    options: GenerationOptions
    serializer: ResponseSerializer
    record: RequestRecord
    request_id: str
    headers: dict[str, str]
    prompts: list[tuple[int, ...]]
    is_large: bool = False
    """Work proportional to the body size runs off the event loop."""
    template_input: TemplateInput | None = None
    """Input of the chat template."""
    prompt_text: str = ""
    """Rendered prompt of a chat."""
    texts: list[str] | None = None
    """Prompts of a completion, if sent as text."""
    embeds: list[PromptEmbeds] | None = None
    """Prompts of a completion, if sent as embeddings."""

    @property
    def param(self) -> str:
        """Name of the request field that holds the prompt."""
        if isinstance(self.body, ChatRequest):
            return "messages"
        return "prompt" if self.embeds is None else PROMPT_EMBEDS

    def cap_priority(self, limit: int | None) -> None:
        """Reduce the priority to the limits of the server (`limit`) and the tenant."""
        caller, routing, owner = caller_of(self.http), self.hints.routing, "server"
        own = None if caller is None else caller.tenant.max_priority
        if own is not None and (limit is None or own < limit):
            limit, owner = own, "tenant"
        if limit is not None and routing.priority > limit:
            self.warn(f"priority {routing.priority} reduced to {limit}, the maximum of this {owner}")
            routing = msgspec.structs.replace(routing, priority=limit)
            self.hints = msgspec.structs.replace(self.hints, routing=routing)

    async def reserve_tokens(self, tenant: TenantRequest, requests: Sequence[Request]) -> None:
        """Take the tokens of prompts and answers from the tenant's budget. Raises RateLimited."""
        num_output = sum(each.stop.max_tokens * each.sampling.num_choices for each in requests)
        num_input = sum(map(len, self.prompts))
        await tenant.reserve_tokens(num_input, num_output, is_default=self.options.max_tokens is None)
        self.headers.update(tenant.headers())

    def warn(self, text: str) -> None:
        known = self.headers.get("x-kvolt-warning")
        self.headers["x-kvolt-warning"] = f"{known}; {text}" if known else text


def build_requests(context: GenerationContext) -> list[Request]:
    """Build the worker request of each prompt; raises InvalidRequest if one does not fit."""
    several = len(context.prompts) > 1
    requests = []
    sampling = context.options.sampling
    check_prompt_logprobs(sum(map(len, context.prompts)), sampling.prompt_logprobs, sampling.num_choices)
    for number, prompt in enumerate(context.prompts):
        request_id = f"{context.request_id}-{number}" if several else context.request_id
        requests.append(
            build_request(
                RequestId(request_id),
                context.model.card,
                prompt,
                context.options,
                context.hints,
                context.param,
                _default_max_tokens(context, prompt),
                context.model.lora,
                None if context.embeds is None else context.embeds[number],
            )
        )
    return requests


def _default_max_tokens(context: GenerationContext, prompt: tuple[int, ...]) -> int:
    """Output limit of a request without `max_tokens`: the model's, else the API's."""
    model = context.model
    limit = model.defaults.max_tokens
    if limit is None and not isinstance(context.body, ChatRequest):
        return _COMPLETION_TOKENS
    num_left = model.max_sequence_tokens - len(prompt)
    if limit is None:
        limit = model.card.default_max_tokens
    return num_left if limit is None else min(num_left, max(limit, context.options.min_tokens))


def build_answer_spec(context: GenerationContext, created: int, now: Callable[[], float]) -> AnswerSpec:
    """Build the parameters of the answer from the prepared request."""
    options, body = context.options, context.body
    streamed = body.stream_options
    echo: list[str] = []
    if isinstance(body, CompletionRequest) and body.echo:
        decode = context.model.processor.vocabulary.decode
        echo = context.texts or [decode(prompt, options.skip_special_tokens) for prompt in context.prompts]
    spec = AnswerSpec(
        request_id=context.request_id,
        created=created,
        model=body.model or context.model.name,
        serializer=context.serializer,
        vocabulary=context.model.processor.vocabulary,
        prompts=context.prompts,
        num_choices=options.sampling.num_choices,
        stop=options.stop,
        include_stop=options.include_stop,
        min_tokens=options.min_tokens,
        skip_special_tokens=options.skip_special_tokens,
        with_logprobs=options.sampling.logprobs is not None,
        with_prompt_logprobs=body.prompt_logprobs is not None,
        echo=echo,
        prompt_only=isinstance(body, CompletionRequest) and body.max_tokens == 0,
        include_usage=bool(streamed and streamed.include_usage),
        continuous_usage=bool(streamed and streamed.continuous_usage_stats),
        extra_fields=frozenset(context.hints.extra_fields),
        annotations=_annotations(context),
        timing=context.record.timing,
        timing_headers=context.record.timing_headers if context.hints.timing else dict,
        observer=context.record,
        now=now,
    )
    if isinstance(body, ChatRequest):
        parser_spec = _parser_spec(context)
        spec.new_parser = parser_spec.new_parser
        spec.skip_special_tokens = options.skip_special_tokens and not parser_spec.keep_special_tokens
        spec.named_call = _names_function(options)
    return spec


def _parser_spec(context: GenerationContext) -> ParserSpec:
    options = context.options
    max_calls = None if options.parallel_tool_calls else 1
    if options.tool_choice == "required":  # a grammar forces calls from the first token
        return ParserSpec(lambda: ParserChain(None, RequiredToolParser(), max_calls=max_calls))
    if _names_function(options):
        return ParserSpec(lambda: NamedToolParser(options.tool_choice))
    assert context.template_input is not None, "a chat"
    return context.model.processor.parser_spec(
        RenderedChat(
            context.template_input, context.prompt_text, context.prompts[0], bool(options.tools), max_calls
        )
    )


def _names_function(options: GenerationOptions) -> bool:
    return options.tool_choice not in ("none", "auto", "required")


def _annotations(context: GenerationContext) -> list[tuple[str, object]]:
    values: Mapping[str, Callable[[], object]] = {
        "request_id": lambda: context.request_id,
        "formatted_prompt": lambda: context.prompt_text,
        "token_ids": lambda: context.prompts[0] if len(context.prompts) == 1 else context.prompts,
    }
    return [(name, values[name]()) for name in context.hints.annotations if name in values]


async def embedded_prompts(
    embeds_fields: str | list[str], card: ModelCard, num_output: int | None, off_loop: OffLoop
) -> list[PromptEmbeds]:
    """Decode embeddings; raises InvalidRequest if one is invalid or has more rows than the context has tokens."""
    texts = [embeds_fields] if isinstance(embeds_fields, str) else embeds_fields

    def read() -> list[PromptEmbeds]:
        return [read_embeds(text) for text in texts]

    is_short = sum(map(len, texts)) <= _INLINE_EMBEDS_CHARACTERS
    decoded = read() if is_short else await off_loop.run(read)
    for each in decoded:
        if each.num_rows >= card.context_length:
            raise too_long(card, each.num_rows, num_output, PROMPT_EMBEDS)
    return decoded


def placeholder_tokens(embeds: PromptEmbeds) -> tuple[int, ...]:
    """One placeholder token per row."""
    return (_NO_TOKEN,) * embeds.num_rows
