"""The requests of the OpenAI endpoints and of /tokenize and /detokenize: their fields and what each may be.

Ranges stand in the types, where the decoder checks them and the OpenAPI page shows them; rules between
fields are in `checks`. A field of value null is a field left out. Unknown fields are not an error here:
`Parsed.unknown` names them, and the caller decides.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvolt.frontend.openai_api import checks
from kvolt.frontend.openai_api.decoding import Parsed, RequestDecoder
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
"""Of one prompt. `max_body_bytes` is below that unless it is set."""

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
"""A text, texts, token ids, or several lists of token ids; `checks` refuses a mixture."""


class Opaque(msgspec.Struct, frozen=True):
    """An object that nobody looks into, so that it costs nothing to decode."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far in every event."""
    include_obfuscation: bool | None = None
    """Taken and not used: nothing here pads events."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None


_Scalar = str | bool | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | None
_Xarg = str | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float


class NamedProcessor(msgspec.Struct, frozen=True, kw_only=True):
    """A logits processor of the engine, with what it is made with."""

    name: _Name
    args: Annotated[dict[str, _Scalar | list[_Scalar]], Meta(max_length=64)] = {}


class _GenerationFields(GuidedFields, frozen=True, kw_only=True):
    """What both endpoints that generate text share."""

    model: _Name
    """A model, or a LoRA adapter of one."""
    max_tokens: _Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 mean all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    logit_bias: (
        Annotated[dict[_TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] | None
    ) = None
    allowed_token_ids: Annotated[list[_TokenId], Meta(min_length=1, max_length=2**20)] | None = None
    logits_processors: Annotated[list[_Name | NamedProcessor], Meta(max_length=16)] | None = None
    """Custom ones that the engine has as plug-ins, by name."""
    vllm_xargs: Annotated[dict[_Name, _Xarg | list[_Xarg]], Meta(max_length=64)] | None = None
    """For vLLM workers, as extra arguments of its sampling parameters; others take none."""

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
    """Name the tokens of `logprobs` "token_id:N", so that tokens of equal text are distinguishable."""

    cache_salt: Annotated[Salt, Meta(min_length=1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    nvext: NvExt | None = None

    user: str | None = None
    """From here on: known, and not used, since they say nothing about the answer."""
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
    """Left out: true unless continue_final_message is."""
    continue_final_message: bool | None = None
    documents: _Documents | None = None
    chat_template: str | None = None
    """Refused: a template is code, and the model's own is used."""
    chat_template_kwargs: _TemplateKwargs | None = None
    chat_template_args: _TemplateKwargs | None = None
    """Another name of `chat_template_kwargs`."""
    reasoning_effort: _Effort | None = None
    thinking: bool | Thinking | None = None

    modalities: Annotated[list[str], Meta(max_length=MAX_MODALITIES)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Taken and not used, like `prediction`: hints that no model here understands."""
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
    """In the place of a prompt, base64 of what torch.save writes of a tensor with a row for each token; several, with
    their answers in order. For vLLM workers that were started with `enable_prompt_embeds`."""
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    logprobs: _TopLogprobs | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: of a prompt, or of messages as a chat would see them."""

    model: _Name | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    """Left out: true for a prompt; false for messages, whose template adds them."""
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

_chat = RequestDecoder(ChatRequest)
_completion = RequestDecoder(CompletionRequest)
_tokenize = RequestDecoder(TokenizeRequest)
_detokenize = RequestDecoder(DetokenizeRequest)


def parse_chat(body: bytes) -> Parsed[ChatRequest]:
    """InvalidRequest or Unsupported, with the field as `param`, for what cannot be served."""
    parsed = _chat.decode(body)
    checks.check_chat(parsed.request)
    return parsed


def parse_completion(body: bytes) -> Parsed[CompletionRequest]:
    parsed = _completion.decode(body)
    checks.check_completion(parsed.request)
    return parsed


def parse_tokenize(body: bytes) -> Parsed[TokenizeRequest]:
    parsed = _tokenize.decode(body)
    checks.check_tokenize(parsed.request)
    return parsed


def parse_detokenize(body: bytes) -> Parsed[DetokenizeRequest]:
    return _detokenize.decode(body)
