"""Converts requests to vLLM's: one per choice, each with its own sampling parameters.

Fields that vLLM cannot follow are refused before anything is submitted.
"""

from __future__ import annotations

import json
from typing import Any

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Request
from kvolt.engines.external.answers import Choice
from kvolt.engines.external.requests import (
    OUTPUT_PENALTIES,
    check_resumable,
    common_sampling,
    input_tokens,
    is_resumed,
    needs_prompt_logprobs,
)
from kvolt.engines.kv_formats.translator import SALT_TAG
from kvolt.engines.vllm.extras import RESUMED, embedded_input, extra_args
from kvolt.engines.vllm.symbols import refusals


def check_supported(request: Request) -> None:
    """Unsupported if vLLM would not answer as the contract requires."""
    if request.media:
        raise Unsupported("vLLM workers get media through an encode worker only", feature="media")
    if is_resumed(request):
        check_resumable(
            request,
            "vLLM",
            "vLLM counts resumed tokens as part of the prompt, to which these penalties do not apply",
            OUTPUT_PENALTIES,
        )


def sampling_params(
    choice: Choice, *, kv_transfer: dict[str, Any] | None = None, only_prompt: bool = False
) -> Any:
    """vLLM's SamplingParams of a choice. `only_prompt`: remote prefill, which generates one token."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    request = choice.request
    sampling, stop = request.sampling, request.stop
    num_before = choice.num_tokens
    extra = extra_args(request)
    if kv_transfer is not None:
        extra["kv_transfer_params"] = kv_transfer
    if num_before and sampling.seed is not None:
        extra[RESUMED] = num_before
    try:
        return SamplingParams(
            **common_sampling(request),
            top_k=sampling.top_k or 0,
            # As vLLM itself does for the choices of one request.
            seed=None if sampling.seed is None else sampling.seed + choice.index,
            max_tokens=1 if only_prompt else stop.max_tokens - num_before,
            min_tokens=0 if only_prompt else max(stop.min_tokens - num_before, 0),
            stop_token_ids=list(stop.stop_token_ids),
            logprobs=None if only_prompt else sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs
            if needs_prompt_logprobs(choice) and not only_prompt
            else None,
            logit_bias=dict(sampling.logit_bias) or None,
            allowed_token_ids=None
            if sampling.allowed_token_ids is None
            else list(sampling.allowed_token_ids),
            structured_outputs=_structured(request.grammar),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
            extra_args=extra or None,
        )
    except refusals() as error:
        raise InvalidRequest(f"vLLM refuses the request: {error}", param="sampling") from error


def _structured(grammar: Grammar | None) -> Any:
    if grammar is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return StructuredOutputsParams(json=grammar.text)
        case GrammarKind.JSON_OBJECT:
            return StructuredOutputsParams(json_object=True)
        case GrammarKind.REGEX:
            return StructuredOutputsParams(regex=grammar.text)
        case GrammarKind.CHOICE:
            return StructuredOutputsParams(choice=json.loads(grammar.text))
        case GrammarKind.EBNF:
            return StructuredOutputsParams(grammar=grammar.text)
        case GrammarKind.STRUCTURAL_TAG:
            return StructuredOutputsParams(structural_tag=grammar.text)


def prompt_input(request: Request, index: int, rows: Any = None) -> Any:
    """Prompt of a choice for vLLM. `rows`: of prompt embeddings (`read_rows`)."""
    from vllm.inputs.engine import tokens_input

    salt = None if request.salt is None else f"{SALT_TAG}{request.salt}"
    if rows is not None:
        return embedded_input(request, index, rows, salt)
    return tokens_input(input_tokens(request, index), cache_salt=salt)
