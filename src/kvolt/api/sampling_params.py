"""Sampling parameters of the Python API, and the request bodies built from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.runtime.config.loader import nearest

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or one of them as in vLLM: `{"prompt": TEXT}`, `{"prompt_token_ids": IDS}`."""


class _WithSuggestions(msgspec.StructMeta):
    """Suggest the nearest field for an unknown keyword argument. A Struct's own `__init__` cannot be replaced."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in cls.__struct_fields__:
                hint = nearest(name, cls.__struct_fields__)
                raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {name!r}{hint}")
        return super().__call__(*args, **kwargs)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=_WithSuggestions):
    """How to generate. Names and meaning as in the HTTP API and in vLLM; None: the model's default.

    A dict of these fields is accepted in its place. Values are checked when they are used, with the messages of the
    HTTP API.
    """

    n: int | None = None
    """Number of outputs per prompt. Default: 1."""
    max_tokens: int | None = None
    """Default: 16 for `generate`, the rest of the context for `chat`."""
    min_tokens: int | None = None
    temperature: float | None = None
    """0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    """The same request with the same seed has the same output."""
    stop: str | Sequence[str] | None = None
    """Strings that end an output; they are not part of it."""
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[str | Mapping[str, Any]] | None = None
    logprobs: int | None = None
    """Return log probabilities of the output tokens and of this many alternatives each."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Not available in streams."""
    response_format: Mapping[str, Any] | None = None
    """OpenAI's output format: `{"type": "json_schema", "json_schema": {...}}` or `{"type": "json_object"}`."""
    structured_outputs: Mapping[str, Any] | None = None
    """vLLM's constraint of the output: one of `json`, `regex`, `choice`, `grammar`."""


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of a chat besides messages and sampling parameters: fields of /v1/chat/completions."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str
    documents: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]


Params = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or a mapping of their fields."""

DEFAULT = SamplingParams()


def checked_params(params: Params) -> SamplingParams:
    """Sampling parameters, from a mapping too. Raises InvalidRequest for another type or an unknown name."""
    if isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Mapping):
        raise InvalidRequest(
            f"sampling_params is a SamplingParams or a dict of its fields, not {type(params).__name__}",
            param="sampling_params",
        )
    try:
        return SamplingParams(**params)
    except TypeError as error:
        raise InvalidRequest(str(error), param="sampling_params") from error


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt or several. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several: list[Any] = _list_items(prompts)
    return [several] if several and _are_integers(several) else several


def checked_prompt(prompt: Prompt) -> str | list[int]:
    """One prompt: a text or a list of token ids. Raises InvalidRequest for another type."""
    if isinstance(prompt, Mapping):
        if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
            raise _not_a_prompt(f"a dict with the keys {', '.join(map(str, prompt))}")
        [prompt] = prompt.values()
    if isinstance(prompt, str):
        return prompt
    token_ids: list[Any] = _list_items(prompt)
    if not _are_integers(token_ids):
        kinds = ", ".join(sorted({type(each).__name__ for each in token_ids}))
        raise _not_a_prompt(f"a list of {kinds}")
    return [int(token_id) for token_id in token_ids]


def _list_items(prompts: object) -> list[Any]:
    if isinstance(prompts, Iterable) and not isinstance(prompts, Mapping | bytes):
        return prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    raise _not_a_prompt(type(prompts).__name__)


def _are_integers(items: list[Any]) -> bool:
    kinds = {type(each) for each in items}
    return bool not in kinds and all(issubclass(kind, Integral) for kind in kinds)


def _not_a_prompt(kind: str) -> InvalidRequest:
    return InvalidRequest(f"a prompt is a text or a list of token ids, not {kind}", param="prompt")


def completion_body(model: str, prompt: Prompt, params: Params, stream: bool) -> bytes:
    return _encode({"model": model, "prompt": checked_prompt(prompt), "stream": stream, **_fields(params)})


def chat_body(
    model: str, messages: Sequence[Message], params: Params, options: ChatOptions, stream: bool
) -> bytes:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest(
            f"messages is a list of messages, not {type(messages).__name__}", param="messages"
        )
    fields = _fields(params)
    num_alternatives = fields.pop("logprobs", None)
    if num_alternatives is not None:
        fields |= {"logprobs": True, "top_logprobs": num_alternatives}
    return _encode({"model": model, "messages": list(messages), "stream": stream, **fields, **options})


def _fields(params: Params) -> dict[str, Any]:
    fields = msgspec.structs.asdict(checked_params(params)).items()
    return {name: value for name, value in fields if value is not None}


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def _plain(value: object) -> object:
    """Other mappings and sequences, such as NumPy arrays of token ids and pydantic's messages."""
    if isinstance(value, Mapping):
        return dict(value)
    for convert in ("tolist", "model_dump"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not a JSON type")
