"""vLLM-specific fields of requests (`Request.extra`), passed as extra arguments of its sampling parameters.

`vllm_xargs` are passed as they are. `logits_processors` are loaded when vLLM starts and act on requests that have
arguments for them, so a requested processor must be loaded and must have arguments. Other fields are refused.

`prompt_embeds` replace the prompt, as vLLM's clients send them: base64 of a tensor written by `torch.save`, with a row
per token. `token_ids` has the same length; its values are ignored. No KV events are published for such blocks, since
they have no tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any

import msgspec

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Request
from kvolt.engines.external.requests import refuse_extra
from kvolt.engines.vllm.symbols import refusals

EMBEDS = "prompt_embeds"


RESUMED = "kvolt_resumed"
"""Extra argument for `worker_extension`: number of tokens before a resumed request with a seed."""
XARGS = "vllm_xargs"
PROCESSORS = "logits_processors"
_RESERVED = frozenset((RESUMED, "kv_transfer_params"))
"""Extra arguments that clients must not set: they name blocks of other requests, or block the engine."""
_GROUP = "vllm.logits_processors"
"""Entry points of packages with logits processors."""


class _Processor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    args: dict[str, Any] = {}


def loaded_processors(configured: Iterable[Any]) -> frozenset[str]:
    """Names of vLLM's logits processors: class with and without module, and entry points. `configured`: vLLM's argument
    `logits_processors`, with `module:class` or classes."""
    names: set[str] = set()
    for each in configured:
        full = each if isinstance(each, str) else f"{each.__module__}:{each.__qualname__}"
        names |= {full, full.rpartition(":")[2]}
    return frozenset(names | {point.name for point in entry_points(group=_GROUP)})


def check_extra(request: Request, processors: Collection[str]) -> None:
    """Unsupported for unknown fields, InvalidRequest for wrong values. `processors`: loaded logits processors."""
    refuse_extra(request, "vLLM", (XARGS, PROCESSORS, EMBEDS))
    xargs = request.extra.get(XARGS)
    if xargs is not None and not (isinstance(xargs, dict) and all(isinstance(key, str) for key in xargs)):
        raise InvalidRequest("vllm_xargs must be an object", param=XARGS)
    for each in _processors(request):
        if each.name not in processors:
            known = ", ".join(sorted(processors)) or "none"
            raise InvalidRequest(
                f"vLLM has no logits processor {each.name[:80]!r} (loaded: {known}); load it with "
                "engine_args.logits_processors",
                param=PROCESSORS,
            )
        if not each.args:
            raise InvalidRequest(
                f"vLLM's logits processor {each.name!r} needs args",
                param=PROCESSORS,
            )
    seen: set[str] = set()
    for param, key in _arguments(request):
        if key in _RESERVED:
            raise InvalidRequest(f"{key!r} is reserved", param=param)
        if key in seen:
            raise InvalidRequest(f"{key!r} is set twice", param=param)
        seen.add(key)


def extra_args(request: Request) -> dict[str, Any]:
    """Extra arguments of a checked request, as a new dict."""
    extra = dict(request.extra.get(XARGS) or {})
    for each in _processors(request):
        extra |= each.args
    return extra


def _arguments(request: Request) -> Iterator[tuple[str, str]]:
    for key in request.extra.get(XARGS) or {}:
        yield XARGS, key
    for each in _processors(request):
        for key in each.args:
            yield PROCESSORS, key


def _processors(request: Request) -> list[_Processor]:
    """Requested processors: names, or names with arguments."""
    requested = request.extra.get(PROCESSORS)
    if not requested:
        return []
    try:
        return [
            _Processor(each) if isinstance(each, str) else msgspec.convert(each, _Processor)
            for each in msgspec.convert(requested, list[Any])
        ]
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"logits_processors: {error}", param=PROCESSORS) from error


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
