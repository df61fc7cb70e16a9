"""Requests of the OpenAI endpoints and of /tokenize and /detokenize: fields and their ranges.

Ranges are part of the types, where the decoder checks them and the OpenAPI page shows them; `checks` has rules
between fields. A null field counts as omitted. Unknown fields are no error here: `Parsed.unknown` lists them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvolt.frontend.openai_api.grammar import GuidedFields
from kvolt.frontend.openai_api.messages import Message
from kvolt.frontend.openai_api.nvext import NvExt, Salt
from kvolt.frontend.openai_api.tools import MAX_TOOLS, Tool, ToolChoice

MAX_MESSAGES = 16_384
MAX_STOPS = 32
MAX_STOP_CHARS = 1024
MAX_TEMPLATE_KWARGS = 1024
MAX_DOCUMENTS = 16_384
MAX_METADATA = 256
MAX_MODALITIES = 16
MAX_OUTPUT_TOKENS = 2**20
MAX_PROMPT_EMBEDS = 64
MAX_EMBEDS_CHARS = 2**25
"""Limit per prompt; `max_body_bytes` is usually lower."""

_Count = Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
_TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
_Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
_TemplateKwargs = Annotated[dict[str, Any], Meta(max_length=MAX_TEMPLATE_KWARGS)]
_Documents = Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)]
_Embeds = Annotated[str, Meta(min_length=1, max_length=MAX_EMBEDS_CHARS)]
_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Prompt = (
    str | Annotated[list[str | _TokenId | Annotated[list[_TokenId], Meta(min_length=1)]], Meta(min_length=1)]
)
"""A text, texts, token ids, or lists of token ids; `checks` rejects a mixture."""


class Opaque(msgspec.Struct, frozen=True):
    """An object that is not decoded."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Include the usage so far in every event."""
    include_obfuscation: bool | None = None
    """Accepted and ignored: events are not padded."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None


_Scalar = str | bool | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | None
_Xarg = str | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float


class NamedProcessor(msgspec.Struct, frozen=True, kw_only=True):
    """A logits processor of the engine, with its arguments."""

    name: _Name
    args: Annotated[dict[str, _Scalar | list[_Scalar]], Meta(max_length=64)] = {}


class _GenerationFields(GuidedFields, frozen=True, kw_only=True):
    """Fields common to chat and completions."""

    model: _Name | None = None
    """Name of a model or LoRA adapter. Default: the model, if only one is ready."""
    max_tokens: _Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 mean all tokens."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    logit_bias: (
        Annotated[dict[_TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] | None
    ) = None
    allowed_token_ids: Annotated[list[_TokenId], Meta(min_length=1, max_length=2**20)] | None = None
    logits_processors: Annotated[list[_Name | NamedProcessor], Meta(max_length=16)] | None = None
    """Logits processor plugins of the engine, by name."""
    vllm_xargs: Annotated[dict[_Name, _Xarg | list[_Xarg]], Meta(max_length=64)] | None = None
    """Extra sampling arguments for vLLM workers; other engines do not accept any."""

    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: _TopLogprobs | None = None
    return_tokens_as_token_ids: bool | None = None
    """Return the tokens of `logprobs` as "token_id:N", so that tokens with equal text can be distinguished."""

    cache_salt: Annotated[Salt, Meta(min_length=1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    nvext: NvExt | None = None

    user: str | None = None
    """This and the following fields are accepted and ignored: they do not affect the response."""
    store: bool | None = None
    metadata: Annotated[dict[str, str | float | bool | None], Meta(max_length=MAX_METADATA)] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatRequest(_GenerationFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: _Messages
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: _TopLogprobs | None = None
    tools: _Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    add_generation_prompt: bool | None = None
    """Default: true unless continue_final_message is set."""
    continue_final_message: bool | None = None
    documents: _Documents | None = None
    chat_template: str | None = None
    """Rejected: templates are code, so only the model's own is used."""
    chat_template_kwargs: _TemplateKwargs | None = None
    chat_template_args: _TemplateKwargs | None = None
    """Alias of `chat_template_kwargs`."""
    reasoning_effort: _Effort | None = None
    thinking: bool | Thinking | None = None

    modalities: Annotated[list[str], Meta(max_length=MAX_MODALITIES)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted and ignored, like `prediction`: hints that no model here uses."""
    prediction: Opaque | None = None
    audio: Opaque | None = None
    web_search_options: Opaque | None = None
    functions: Annotated[list[Opaque], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: str | Opaque | None = None


class CompletionRequest(_GenerationFields, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: Prompt | None = None
    prompt_embeds: (
        _Embeds | Annotated[list[_Embeds], Meta(min_length=1, max_length=MAX_PROMPT_EMBEDS)] | None
    ) = None
    """Prompt embeddings instead of a prompt: base64 of a tensor written by torch.save, one row per token. Several
    prompts get their answers in order. Requires vLLM workers started with `enable_prompt_embeds`."""
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    """0 with `echo`: only the prompt is returned, with its log probabilities if `logprobs` is set."""
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    logprobs: _TopLogprobs | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: tokens of a prompt, or of messages rendered by the chat template."""

    model: _Name | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt; false for messages, whose template adds special tokens."""
    return_token_strs: bool | None = None

    tools: _Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: _Documents | None = None
    chat_template: str | None = None
    chat_template_kwargs: _TemplateKwargs | None = None
    chat_template_args: _TemplateKwargs | None = None
    reasoning_effort: _Effort | None = None
    thinking: bool | Thinking | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize"""

    model: _Name | None = None
    tokens: list[_TokenId]


GenerationRequest = ChatRequest | CompletionRequest
TemplateRequest = ChatRequest | TokenizeRequest
