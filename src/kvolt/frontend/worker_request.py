"""Builds the worker request of one prompt and checks it against the model's context. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from kvolt.core.card import ModelCard
from kvolt.core.errors import InvalidRequest
from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, StopConditions
from kvolt.frontend.openai_api.generation import GenerationOptions
from kvolt.frontend.openai_api.headers import RequestHints
from kvolt.frontend.openai_api.prompt_embeds import PromptEmbeds

VLLM_XARGS = "vllm_xargs"
PROMPT_EMBEDS = "prompt_embeds"
"""Keys of `Request.extra` that only some engines support (`EngineInfo.extras`)."""
_MAX_PROMPT_LOGPROBS = 131_072


def too_long(card: ModelCard, num_tokens: int, num_output: int | None, param: str) -> InvalidRequest:
    """`num_output`: `max_tokens` of the request."""
    requested = "" if num_output is None else f" and {num_output} output tokens were requested"
    remedy = (
        "shorten the prompt"
        if num_tokens >= card.context_length
        else "shorten the prompt or lower max_tokens"
    )
    return InvalidRequest(
        f"this model's maximum context length is {card.context_length} tokens; the prompt has {num_tokens} tokens"
        f"{requested}; {remedy}",
        param=param,
        code="context_length_exceeded",
    )


def check_prompt_logprobs(num_tokens: int, num_alternatives: int | None, num_choices: int = 1) -> None:
    """Limit the log probabilities of a prompt: serializing them blocks the process, once per choice."""
    if num_alternatives is None:
        return
    num_total = num_tokens * (num_alternatives + 1) * num_choices
    if num_total > _MAX_PROMPT_LOGPROBS:
        times = f" in {num_choices} choices" if num_choices > 1 else ""
        raise InvalidRequest(
            f"{num_tokens} prompt tokens with {num_alternatives} alternatives each require {num_total} log "
            f"probabilities{times}; the limit is {_MAX_PROMPT_LOGPROBS}",
            param="prompt_logprobs",
        )


def build_request(
    request_id: RequestId,
    card: ModelCard,
    prompt: tuple[int, ...],
    options: GenerationOptions,
    hints: RequestHints,
    param: str = "prompt",
    default_max_tokens: int | None = None,
    lora: str | None = None,
    embeds: PromptEmbeds | None = None,
) -> Request:
    """Build the request; raises InvalidRequest if it does not fit into the context.

    `param` is the client's field of the prompt. `default_max_tokens` limits the output of a request without
    `max_tokens` (None: the rest of the context). With `embeds`, `prompt` consists of placeholder tokens.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty", param=param)
    num_left = card.context_length - len(prompt)
    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = max(num_left if default_max_tokens is None else min(default_max_tokens, num_left), 1)
    if max_tokens > num_left:
        raise too_long(card, len(prompt), options.max_tokens, "max_tokens" if num_left > 0 else param)
    salt = hints.salt if embeds is None else f"{hints.salt or ''}/{embeds.digest}"
    hasher = SequenceHasher(card.block_size, request_seed(lora, salt))
    hasher.extend(prompt)
    return Request(
        request_id=request_id,
        model=card.name,
        token_ids=prompt,
        block_size=card.block_size,
        sequence_hashes=tuple(hasher.sequence),
        stop=StopConditions(
            max_tokens=max_tokens,
            min_tokens=min(options.min_tokens, max_tokens),
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
        ),
        sampling=options.sampling,
        grammar=options.grammar,
        salt=salt,
        lora=lora,
        routing=hints.routing,
        extra=_extra(options, embeds),
    )


def _extra(options: GenerationOptions, embeds: PromptEmbeds | None) -> dict[str, Any]:
    extras = {
        "logits_processors": msgspec.to_builtins(options.logits_processors),
        VLLM_XARGS: options.vllm_xargs,
        PROMPT_EMBEDS: None if embeds is None else embeds.text,
    }
    return {name: value for name, value in extras.items() if value}
