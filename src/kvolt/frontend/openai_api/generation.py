"""Generation options of a request, with the model's defaults applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.core.errors import ConfigError, InvalidRequest, Unsupported
from kvolt.core.request import Grammar, Sampling
from kvolt.frontend.openai_api.grammar import grammar_param, is_guided, request_grammar
from kvolt.frontend.openai_api.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    NamedProcessor,
)
from kvolt.frontend.openai_api.tools import NO_TOOLS, Tool, Toolset, resolve_tools, tool_grammar


class GenerationDefaults(Sampling, frozen=True, kw_only=True):
    """A model's values of what a request does not set."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None


_DEFAULTS = GenerationDefaults()


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one request, independent of API formats."""

    sampling: Sampling
    max_tokens: int | None = None
    """None: the rest of the context, or the server's default."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    logits_processors: tuple[str | NamedProcessor, ...] = ()
    vllm_xargs: dict[str, Any] = {}
    tool_choice: str = "none"
    """"none", "auto", "required" or the name of the function that must be called."""
    tools: tuple[Tool, ...] = ()
    """Tools passed to the template; empty with `tool_choice` "none"."""
    parallel_tool_calls: bool = True


def generation_defaults(values: Mapping[str, Any]) -> GenerationDefaults:
    """Convert a model card's `defaults`, once per model; raises ConfigError if they are invalid."""
    try:
        return msgspec.convert(dict(values), GenerationDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid generation defaults of the model: {error}", key="defaults") from error


def chat_options(request: ChatRequest, defaults: GenerationDefaults = _DEFAULTS) -> GenerationOptions:
    """Options of a chat. Raises InvalidRequest or Unsupported for an invalid grammar or tool choice."""
    parallel = request.parallel_tool_calls is not False
    toolset = resolve_tools(request.tools, request.tool_choice)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    limit = request.max_completion_tokens
    return _options(
        request,
        sampling=_sampling(request, defaults, logprobs, request.prompt_logprobs),
        max_tokens=request.max_tokens if limit is None else limit,
        grammar=_chat_grammar(request, toolset, parallel),
        toolset=toolset,
        parallel=parallel,
    )


def completion_options(
    request: CompletionRequest, defaults: GenerationDefaults = _DEFAULTS
) -> GenerationOptions:
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is None and request.echo:
        prompt_logprobs = request.logprobs  # an echoed prompt has them too
    return _options(
        request,
        sampling=_sampling(request, defaults, request.logprobs, prompt_logprobs),
        max_tokens=1 if request.max_tokens == 0 else request.max_tokens,  # engines compute at least one
        grammar=request_grammar(request),
    )


def with_client_param(
    error: InvalidRequest, request: GenerationRequest, options: GenerationOptions
) -> InvalidRequest:
    """Translate a worker's error: replace `param` by the client's field name."""
    param = error.fields.get("param")
    if param == "token_ids":
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
    elif param == "grammar":
        param = "tools" if options.tool_choice not in ("none", "auto") else grammar_param(request)
    return type(error)(error.message, **{**error.fields, "param": param})


def list_prompts(request: CompletionRequest) -> list[str] | list[list[int]]:
    """List of prompts, whatever their form in the request."""
    prompt: Any = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    several: list[str] | list[list[int]] = prompt
    return several


def _options(
    request: GenerationRequest,
    *,
    sampling: Sampling,
    max_tokens: int | None,
    grammar: Grammar | None,
    toolset: Toolset = NO_TOOLS,
    parallel: bool = True,
) -> GenerationOptions:
    stop = request.stop
    return GenerationOptions(
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop=(stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop)) if stop else (),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos or False,
        include_stop=request.include_stop_str_in_output or False,
        skip_special_tokens=request.skip_special_tokens is not False,
        grammar=grammar,
        logits_processors=tuple(request.logits_processors or ()),
        vllm_xargs=request.vllm_xargs or {},
        tool_choice=toolset.choice,
        tools=toolset.tools,
        parallel_tool_calls=parallel,
    )


def _sampling(
    request: GenerationRequest, defaults: Sampling, logprobs: int | None, prompt_logprobs: int | None
) -> Sampling:
    temperature = _value_or(request.temperature, defaults.temperature)
    if request.nvext is not None and request.nvext.greed_sampling:
        temperature = 0.0
    top_k = defaults.top_k if request.top_k is None else request.top_k
    allowed = request.allowed_token_ids
    return Sampling(
        temperature=temperature,
        top_p=_value_or(request.top_p, defaults.top_p),
        top_k=top_k if top_k is not None and top_k > 0 else None,
        min_p=_value_or(request.min_p, defaults.min_p),
        presence_penalty=_value_or(request.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_value_or(request.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_value_or(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=defaults.logit_bias if request.logit_bias is None else request.logit_bias,
        allowed_token_ids=defaults.allowed_token_ids if allowed is None else tuple(allowed),
        seed=defaults.seed if request.seed is None else request.seed,
        num_choices=request.n or 1,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _value_or(value: float | None, default: float) -> float:
    return default if value is None else value


def _chat_grammar(request: ChatRequest, toolset: Toolset, parallel: bool) -> Grammar | None:
    """Grammar of a chat. A required tool call is the whole output, so `response_format` is ignored then."""
    grammar = request_grammar(request)
    calls = tool_grammar(toolset, parallel)
    if grammar is None or calls is None:
        if grammar is not None and toolset.tools and not is_guided(request):
            raise Unsupported(
                "response_format is not supported with optional tools: set tool_choice to 'none', 'required' or a "
                "function, or remove one of them",
                feature="response_format_with_tools",
                param="response_format",
            )
        return grammar or calls
    if is_guided(request):
        raise InvalidRequest(
            "tool_choice requires a tool call and cannot be combined with another constraint on the output",
            param="tool_choice",
        )
    return calls
