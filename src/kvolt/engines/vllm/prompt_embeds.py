"""Prompts as embeddings (`Request.extra["prompt_embeds"]`), as vLLM's clients send them.

Base64 of a tensor written by `torch.save`, with a row per token. `token_ids` has the same length; its values are
ignored. No KV events are published for such blocks, since they have no tokens.
"""

from __future__ import annotations

from typing import Any

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Request
from kvolt.engines.vllm.refusals import refusals

EMBEDS = "prompt_embeds"


def check_embeds(request: Request, is_enabled: bool) -> None:
    """Validate `prompt_embeds`. `is_enabled`: whether vLLM was started with them."""
    if EMBEDS not in request.extra:
        return
    if not is_enabled:
        raise Unsupported("vLLM was started without enable_prompt_embeds", feature=EMBEDS, param=EMBEDS)
    if not isinstance(request.extra[EMBEDS], str | bytes):
        raise InvalidRequest("prompt_embeds must be base64 of a tensor as torch.save writes it", param=EMBEDS)
    if request.sampling.prompt_logprobs is not None:
        raise Unsupported("prompt embeddings have no prompt logprobs", feature="prompt_logprobs")
    if request.handoff is not None:
        refuse_handoff(request)


def refuse_handoff(request: Request) -> None:
    """Unsupported for prompt embeddings with remote prefill."""
    if EMBEDS in request.extra:
        raise Unsupported(
            "prompt embeddings do not support remote prefill", feature="prefill of prompt_embeds"
        )


def read_rows(request: Request, model_config: Any) -> Any:
    """Decode the tensor. InvalidRequest if it is malformed or does not fit the model. For a thread: it may be
    megabytes. vLLM loads it with `weights_only`, so no code in it is executed."""
    from vllm.renderers.embed_utils import safe_load_prompt_embeds

    num_tokens = len(request.token_ids)
    try:
        rows = safe_load_prompt_embeds(model_config, request.extra[EMBEDS])
    except refusals() as error:
        raise InvalidRequest(f"vLLM refuses the request: {error}", param=EMBEDS) from error
    if len(rows) != num_tokens:
        raise InvalidRequest(f"prompt_embeds has {len(rows)} rows for {num_tokens} tokens", param=EMBEDS)
    return rows


def embedded_input(request: Request, index: int, rows: Any, salt: str | None) -> Any:
    """vLLM's input. Tokens of a resumed request follow as tokens."""
    from vllm.inputs.engine import embeds_input

    num_rows, prior = len(rows), request.prior_tokens_of(index)
    if not prior:
        return embeds_input(rows, cache_salt=salt)
    whole = rows.new_zeros(num_rows + len(prior), rows.shape[1])
    whole[:num_rows] = rows
    return embeds_input(
        whole,
        cache_salt=salt,
        prompt_token_ids=[*request.token_ids, *prior],
        is_token_ids=[False] * num_rows + [True] * len(prior),
    )
