"""What a worker is sent for one prompt: the request in tokens, checked against the model's context. Pure."""

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
"""Parts of `Request.extra`, which not every worker takes (`EngineInfo.extras`)."""
_MAX_PROMPT_LOGPROBS = 131_072


def too_long(card: ModelCard, num_tokens: int, num_wanted: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"this model's maximum context length is {card.context_length} tokens; the prompt has {num_tokens} and "
        f"{num_wanted} more were asked for",
        param=param,
        code="context_length_exceeded",
    )


def check_prompt_logprobs(num_tokens: int, num_alternatives: int | None, num_choices: int = 1) -> None:
    """They come all at once, and with each choice again: the whole process would wait for those of a long prompt."""
    if num_alternatives is None:
        return
    num_told = num_tokens * (num_alternatives + 1) * num_choices
    if num_told > _MAX_PROMPT_LOGPROBS:
        times = f" in {num_choices} choices" if num_choices > 1 else ""
        raise InvalidRequest(
            f"{num_tokens} prompt tokens with {num_alternatives} alternatives each make {num_told} log "
            f"probabilities{times}; at most {_MAX_PROMPT_LOGPROBS} are answered at once",
            param="prompt_logprobs",
        )


def build_request(
    request_id: RequestId,
    card: ModelCard,
    prompt: tuple[int, ...],
    options: GenerationOptions,
    said: RequestHints,
    param: str = "prompt",
    most_unasked: int | None = None,
    lora: str | None = None,
    embeds: PromptEmbeds | None = None,
) -> Request:
    """What the worker gets, checked against the model's context. `param` is what the client calls the prompt.

    A request that names no limit may take what the context has room for, or `most_unasked` of it. `embeds`: the prompt,
    where it came as vectors; `prompt` then is as many tokens, which say nothing.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty", param=param)
    room = card.context_length - len(prompt)
    wanted = options.max_tokens
    if wanted is None:
        wanted = max(room if most_unasked is None else min(most_unasked, room), 1)
    if wanted > room:
        raise too_long(card, len(prompt), wanted, "max_tokens" if room > 0 else param)
    salt = said.salt if embeds is None else f"{said.salt or ''}/{embeds.digest}"
    hasher = SequenceHasher(card.block_size, request_seed(lora, salt))
    hasher.extend(prompt)
    return Request(
        request_id=request_id,
        model=card.name,
        token_ids=prompt,
        block_size=card.block_size,
        sequence_hashes=tuple(hasher.sequence),
        stop=StopConditions(
            max_tokens=wanted,
            min_tokens=min(options.min_tokens, wanted),
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
        ),
        sampling=options.sampling,
        grammar=options.grammar,
        salt=salt,
        lora=lora,
        routing=said.routing,
        extra=_extra(options, embeds),
    )


def _extra(options: GenerationOptions, embeds: PromptEmbeds | None) -> dict[str, Any]:
    given = {
        "logits_processors": msgspec.to_builtins(options.logits_processors),
        VLLM_XARGS: options.vllm_xargs,
        PROMPT_EMBEDS: None if embeds is None else embeds.text,
    }
    return {name: value for name, value in given.items() if value}
