"""Decodes and validates the bodies of the OpenAI endpoints and of /tokenize and /detokenize.

The types in `requests` validate single fields; here are the rules between fields, and the check of token ids against
the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.frontend.openai_api.decoding import Parsed, RequestDecoder
from kvolt.frontend.openai_api.messages import check_messages
from kvolt.frontend.openai_api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TemplateRequest,
    TokenizeRequest,
)
from kvolt.frontend.openai_api.structure import check_nesting
from kvolt.frontend.openai_api.tools import check_tools

MAX_CHOICES = 128
"""Limit of prompts times `n`."""

_TEMPLATE_OWN = frozenset(
    (
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "documents",
        "eos_token",
        "messages",
        "self",
        "tokenize",
        "tools",
    )
)
"""Template variables set by the server."""


_chat = RequestDecoder(ChatRequest)
_completion = RequestDecoder(CompletionRequest)
_tokenize = RequestDecoder(TokenizeRequest)
_detokenize = RequestDecoder(DetokenizeRequest)


def parse_chat(body: bytes) -> Parsed[ChatRequest]:
    """Raises InvalidRequest or Unsupported with the invalid field as `param`."""
    parsed = _chat.decode(body)
    _check_chat(parsed.request)
    return parsed


def parse_completion(body: bytes) -> Parsed[CompletionRequest]:
    parsed = _completion.decode(body)
    _check_completion(parsed.request)
    return parsed


def parse_tokenize(body: bytes) -> Parsed[TokenizeRequest]:
    parsed = _tokenize.decode(body)
    _check_tokenize(parsed.request)
    return parsed


def parse_detokenize(body: bytes) -> Parsed[DetokenizeRequest]:
    return _detokenize.decode(body)


def _check_chat(request: ChatRequest) -> None:
    _check_generation(request)
    check_messages(request.messages)
    _check_template(request)
    limits = request.max_tokens, request.max_completion_tokens
    if None not in limits and limits[0] != limits[1]:
        raise InvalidRequest(
            f"max_tokens is {limits[0]} and max_completion_tokens is {limits[1]}; send only the latter",
            param="max_tokens",
        )
    _check_min_tokens(request.min_tokens, request.max_completion_tokens, "max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs requires logprobs", param="top_logprobs")
    if request.functions is not None or request.function_call is not None:
        param = "functions" if request.functions is not None else "function_call"
        raise Unsupported(
            f"{param} is not supported: use tools and tool_choice", feature="functions", param=param
        )
    if request.modalities and request.modalities != ["text"]:
        raise Unsupported("modalities: only 'text' is supported", feature="modalities", param="modalities")
    for name, field in (("audio", request.audio), ("web_search_options", request.web_search_options)):
        if field is not None:
            raise Unsupported(f"{name} is not supported", feature=name, param=name)


def _check_completion(request: CompletionRequest) -> None:
    _check_generation(request)
    num_choices = request.n or 1
    num_prompts = _check_prompt(request)
    if num_prompts * num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {num_choices} are {num_prompts * num_choices} choices; the limit is "
            f"{MAX_CHOICES}",
            param=("prompt" if request.prompt_embeds is None else "prompt_embeds")
            if num_prompts > 1
            else "n",
        )
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest(
            "max_tokens is 0: set echo to get the prompt, or send 1 or more", param="max_tokens"
        )
    if request.suffix:
        raise Unsupported("suffix is not supported", feature="suffix", param="suffix")
    if request.best_of is not None:
        _check_best_of(request.best_of, num_choices, bool(request.stream))


def _check_tokenize(request: TokenizeRequest) -> None:
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if request.messages is not None:
        check_messages(request.messages)
    _check_template(request)


def _check_generation(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options requires stream", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    _check_min_tokens(request.min_tokens, request.max_tokens, "max_tokens")


def _check_min_tokens(minimum: int | None, maximum: int | None, name: str) -> None:
    if minimum is not None and maximum is not None and minimum > maximum:
        raise InvalidRequest(f"min_tokens is {minimum}, above {name} of {maximum}", param="min_tokens")


def _check_prompt(request: CompletionRequest) -> int:
    """Validate the prompt; return the number of prompts."""
    prompt, embeds = request.prompt, request.prompt_embeds
    if embeds is not None:
        _check_embeds(request)
        return 1 if isinstance(embeds, str) else len(embeds)
    if prompt is None:
        raise InvalidRequest("prompt is required", param="prompt")
    if isinstance(prompt, str):
        return 1
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise InvalidRequest("prompt mixes texts, token ids and lists of token ids", param="prompt")
    return 1 if kinds == {int} else len(prompt)


def _check_embeds(request: CompletionRequest) -> None:
    """Validate `prompt_embeds`. Clients that must send a prompt send an empty string with it."""
    if request.prompt not in (None, "", [""]):
        raise InvalidRequest("send either prompt or prompt_embeds", param="prompt")
    if request.nvext is not None and request.nvext.token_data is not None:
        raise InvalidRequest("send either nvext.token_data or prompt_embeds", param="nvext.token_data")
    for name in ("echo", "prompt_logprobs"):
        if getattr(request, name) not in (None, False):
            raise InvalidRequest(f"prompt embeddings have no token ids: {name} is not available", param=name)


def _check_best_of(best_of: int, num_choices: int, stream: bool) -> None:
    if best_of > 1 and stream:
        raise InvalidRequest("best_of cannot be streamed", param="best_of")
    if best_of < num_choices:
        raise InvalidRequest(f"best_of is {best_of}, below n = {num_choices}", param="best_of")
    if best_of != num_choices:
        raise Unsupported(
            f"best_of must equal n: best_of is {best_of}, n is {num_choices}",
            feature="best_of",
            param="best_of",
        )


def _check_template(request: TemplateRequest) -> None:
    if request.tools:
        check_tools(request.tools)
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are mutually exclusive",
            param="continue_final_message",
        )
    if request.chat_template is not None:
        raise Unsupported(
            "chat_template is not supported: the model's own template is used",
            feature="chat_template",
            param="chat_template",
        )
    if request.documents is not None:
        check_nesting(request.documents, "documents")
    kwargs_field, other = request.chat_template_kwargs, request.chat_template_args
    if kwargs_field is not None:
        _check_template_kwargs(kwargs_field, "chat_template_kwargs")
    if other is not None:
        _check_template_kwargs(other, "chat_template_args")
        if kwargs_field is not None and kwargs_field != other:
            raise InvalidRequest(
                "chat_template_kwargs and chat_template_args are aliases, but have different values",
                param="chat_template_args",
            )
    thinking = request.thinking
    if thinking is not None and not isinstance(thinking, bool) and thinking.budget_tokens is not None:
        raise Unsupported(
            "thinking.budget_tokens is not supported: no engine can limit the reasoning length",
            feature="thinking.budget_tokens",
            param="thinking.budget_tokens",
        )


def _check_template_kwargs(kwargs: dict[str, Any], param: str) -> None:
    check_nesting(kwargs, param)
    for name in kwargs:
        if name in _TEMPLATE_OWN:
            raise InvalidRequest(f"{param} must not contain {name!r}", param=f"{param}.{name}")


def check_vocabulary(request: GenerationRequest | DetokenizeRequest, vocabulary_size: int) -> None:
    """Raise InvalidRequest if the request contains a token id outside the model's vocabulary."""
    for param, token_ids in _token_ids(request):
        highest = max(token_ids, default=0)
        if highest >= vocabulary_size:
            raise InvalidRequest(
                f"{param} contains token id {highest}; the model's vocabulary ends at {vocabulary_size - 1}",
                param=param,
            )


def _token_ids(request: GenerationRequest | DetokenizeRequest) -> Iterator[tuple[str, Iterable[int]]]:
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "tokens"):
        token_ids = getattr(request, name, None)
        if token_ids:
            yield name, token_ids
    nvext = getattr(request, "nvext", None)
    if nvext is not None and nvext.token_data:
        yield "nvext.token_data", nvext.token_data
    prompt: Any = getattr(request, "prompt", None)
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        yield "prompt", prompt
    elif isinstance(prompt, list) and isinstance(prompt[0], list):
        yield from ((f"prompt[{index}]", token_ids) for index, token_ids in enumerate(prompt))
