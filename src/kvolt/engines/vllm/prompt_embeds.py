"""A prompt as vectors (`Request.extra["prompt_embeds"]`): what the model's own table of its tokens would have given.

As vLLM's clients send them: base64 of what `torch.save` writes of a tensor with a row for each token. `token_ids` has
as many, of which only the number counts. Routers are not told of such blocks: nothing in our words names them.
"""

from __future__ import annotations

from typing import Any

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Request
from kvolt.engines.vllm.refusals import refusals

EMBEDS = "prompt_embeds"


def check_embeds(request: Request, is_enabled: bool) -> None:
    """`is_enabled`: vLLM was started so that it takes them."""
    if EMBEDS not in request.extra:
        return
    if not is_enabled:
        raise Unsupported("vLLM was started without enable_prompt_embeds", feature=EMBEDS, param=EMBEDS)
    if not isinstance(request.extra[EMBEDS], str | bytes):
        raise InvalidRequest("prompt_embeds must be base64 of a tensor as torch.save writes it", param=EMBEDS)
    if request.sampling.prompt_logprobs is not None:
        raise Unsupported("a prompt of vectors has no tokens to tell logprobs of", feature="prompt_logprobs")
    if request.handoff is not None:
        refuse_handoff(request)


def refuse_handoff(request: Request) -> None:
    """Of a request that is computed in two places, were it one of vectors."""
    if EMBEDS in request.extra:
        raise Unsupported(
            "a prompt of vectors is computed where it is answered", feature="prefill of prompt_embeds"
        )


def read_rows(request: Request, model_config: Any) -> Any:
    """The tensor. InvalidRequest for what is none, or none of the model's (`model_config`: vLLM's). For a thread: it
    may be megabytes. vLLM reads it with `weights_only`, so nothing in it is run."""
    from vllm.renderers.embed_utils import safe_load_prompt_embeds

    num_tokens = len(request.token_ids)
    try:
        rows = safe_load_prompt_embeds(model_config, request.extra[EMBEDS])
    except refusals() as error:
        raise InvalidRequest(f"vLLM refuses it: {error}", param=EMBEDS) from error
    if len(rows) != num_tokens:
        raise InvalidRequest(f"prompt_embeds has {len(rows)} rows for {num_tokens} tokens", param=EMBEDS)
    return rows


def embedded_input(request: Request, index: int, rows: Any, salt: str | None) -> Any:
    """vLLM's input. Tokens that were said already go as tokens."""
    from vllm.inputs.engine import embeds_input

    num_rows, said = len(rows), request.resumed(index)
    if not said:
        return embeds_input(rows, cache_salt=salt)
    whole = rows.new_zeros(num_rows + len(said), rows.shape[1])
    whole[:num_rows] = rows
    return embeds_input(
        whole,
        cache_salt=salt,
        prompt_token_ids=[*request.token_ids, *said],
        is_token_ids=[False] * num_rows + [True] * len(said),
    )
