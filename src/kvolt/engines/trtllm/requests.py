"""Converts requests to TensorRT-LLM's: one per choice, since it reports the ends of several choices only together.

Fields that TensorRT-LLM cannot follow are refused before anything is submitted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Request
from kvolt.engines.external import requests
from kvolt.engines.external.answers import Choice
from kvolt.engines.external.requests import refuse_extra
from kvolt.engines.trtllm.arguments import Seeds

_MAX_SEED = (1 << 63) - 1


def check_supported(request: Request, *, has_grammars: bool, seeds: Seeds) -> None:
    """Unsupported if TensorRT-LLM would not answer as the contract requires."""
    if request.media:
        raise Unsupported("the TensorRT-LLM adapter does not support media", feature="media")
    refuse_extra(request, "TensorRT-LLM")
    if is_seeded(request) and seeds is Seeds.NONE:
        raise Unsupported(
            "TensorRT-LLM's default sampler has no seed per request (see the argument `seeds`)",
            feature="seed",
        )
    if request.grammar is not None and not has_grammars:
        raise Unsupported(
            "TensorRT-LLM was started without llm_args.guided_decoding_backend", feature="grammar"
        )


def is_seeded(request: Request) -> bool:
    """Whether the request's seed determines its tokens."""
    return request.sampling.temperature > 0 and request.sampling.seed is not None


def needs_sampler_state(request: Request, seeds: Seeds) -> bool:
    """Whether the next token depends on the number of draws so far, which another engine does not know."""
    return is_seeded(request) and seeds is not Seeds.BY_POSITION


def check_resumable(request: Request, seeds: Seeds) -> None:
    """Unsupported if a resumed request would not continue as an uninterrupted one: earlier tokens become part of the
    prompt."""
    if not requests.is_resumed(request):
        return
    requests.check_resumable(
        request,
        "TensorRT-LLM",
        "TensorRT-LLM counts resumed tokens as part of the prompt, which has its own penalties",
    )
    if needs_sampler_state(request, seeds):
        raise Unsupported(
            "TensorRT-LLM's sampler cannot resume a seeded request (see the argument `seeds`)",
            feature="resume with a seed",
        )


def sampling_params(choice: Choice, eos_token_ids: Sequence[int], *, max_tokens: int) -> Any:
    """TensorRT-LLM's SamplingParams of a choice. InvalidRequest if it refuses them."""
    from tensorrt_llm.llmapi import SamplingParams

    request = choice.request
    sampling, stop = request.sampling, request.stop
    # Its min_tokens covers one EOS token only and no stop tokens; `outputs` applies the rules to such answers.
    is_ended_here = stop.min_tokens > choice.num_tokens
    stops = [] if is_ended_here else list(stop.stop_token_ids)
    if not (is_ended_here or stop.ignore_eos):
        stops += [token for token in eos_token_ids[1:] if token not in stops]
    try:
        return SamplingParams(
            **_sampling_fields(request, choice),
            end_id=eos_token_ids[0] if eos_token_ids else None,
            max_tokens=max_tokens,
            stop_token_ids=stops or None,
            include_stop_str_in_output=True,  # the token that ends an answer is its last
            ignore_eos=stop.ignore_eos or is_ended_here,
            presence_penalty=sampling.presence_penalty or None,
            frequency_penalty=sampling.frequency_penalty or None,
            repetition_penalty=sampling.repetition_penalty if sampling.repetition_penalty != 1.0 else None,
            # 0 would disable logprobs.
            logprobs=None if sampling.logprobs is None else max(sampling.logprobs, 1),
            guided_decoding=_guided(request.grammar),
            detokenize=False,
            add_special_tokens=False,
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"TensorRT-LLM refuses the request: {error}", param="sampling") from error


def _sampling_fields(request: Request, choice: Choice) -> dict[str, Any]:
    sampling = request.sampling
    if sampling.temperature == 0:
        return {"top_k": 1}
    # Without top_p and top_k it samples greedily, and a request without a seed gets seed 0.
    seed = (
        sampling.seed + choice.index
        if sampling.seed is not None
        else xxh3_64_intdigest(choice.engine_id.encode())
    )
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "seed": seed & _MAX_SEED,
    }


def _guided(grammar: Grammar | None) -> Any:
    if grammar is None:
        return None
    from tensorrt_llm.llmapi import GuidedDecodingParams

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return GuidedDecodingParams(json=grammar.text)
        case GrammarKind.JSON_OBJECT:
            return GuidedDecodingParams(json_object=True)
        case GrammarKind.REGEX:
            return GuidedDecodingParams(regex=grammar.text)
        case GrammarKind.CHOICE:
            words = " | ".join(json.dumps(each) for each in json.loads(grammar.text))
            return GuidedDecodingParams(grammar=f"root ::= {words}")
        case GrammarKind.EBNF:
            return GuidedDecodingParams(grammar=grammar.text)
        case GrammarKind.STRUCTURAL_TAG:
            return GuidedDecodingParams(structural_tag=grammar.text)
