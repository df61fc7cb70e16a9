"""A request in TensorRT-LLM's words: one of its requests for each choice, since it tells the ends of several only
together. Owns which of our fields it can follow. What it cannot is refused here, before it has anything of the request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Request
from kvolt.engines.external import resuming
from kvolt.engines.external.answers import Choice
from kvolt.engines.external.extras import refuse_extra
from kvolt.engines.trtllm.arguments import Seeds

_MAX_SEED = (1 << 63) - 1


def check_supported(request: Request, *, has_grammars: bool, seeds: Seeds) -> None:
    """Unsupported for what TensorRT-LLM would not answer as the contract says."""
    sampling = request.sampling
    if request.media:
        raise Unsupported("kvolt gives TensorRT-LLM no media", feature="media")
    refuse_extra(request, "TensorRT-LLM")
    if sampling.prompt_logprobs is not None:
        raise Unsupported(
            "TensorRT-LLM tells the most likely tokens of a prompt, but not its own",
            feature="prompt_logprobs",
        )
    if sampling.logit_bias:
        raise Unsupported("kvolt cannot bias TensorRT-LLM's tokens", feature="logit_bias")
    if sampling.allowed_token_ids is not None:
        raise Unsupported("TensorRT-LLM cannot be held to some tokens", feature="allowed_token_ids")
    if is_seeded(request) and seeds is Seeds.NONE:
        raise Unsupported(
            "TensorRT-LLM's default sampler keeps no request's seed (see the argument `seeds`)",
            feature="seed",
        )
    if request.grammar is not None and not has_grammars:
        raise Unsupported(
            "TensorRT-LLM was started without llm_args.guided_decoding_backend", feature="grammar"
        )


def is_seeded(request: Request) -> bool:
    """Whether its seed says which tokens it has."""
    return request.sampling.temperature > 0 and request.sampling.seed is not None


def is_drawn_anew(request: Request, seeds: Seeds) -> bool:
    """Whether the tokens that come next hang on how many were drawn before, which another engine does not know."""
    return is_seeded(request) and seeds is not Seeds.BY_POSITION


def check_resumable(request: Request, seeds: Seeds) -> None:
    """Unsupported for one whose client has tokens of it already, and which would not go on as if nothing had
    happened: what they are is part of the prompt then."""
    if not resuming.is_under_way(request):
        return
    resuming.check_resumable(
        request,
        "TensorRT-LLM",
        "TensorRT-LLM takes what it goes on after for the prompt, which has penalties of its own",
    )
    if is_drawn_anew(request, seeds):
        raise Unsupported(
            "TensorRT-LLM's sampler does not go on where a seeded answer had stopped (see the argument `seeds`)",
            feature="resume with a seed",
        )


def sampling_params(
    choice: Choice, eos_token_ids: Sequence[int], *, max_tokens: int, has_grammar: bool = True
) -> Any:
    """TensorRT-LLM's SamplingParams of a choice. InvalidRequest for what it refuses."""
    from tensorrt_llm.llmapi import SamplingParams

    request = choice.request
    given, stop = request.sampling, request.stop
    # It keeps min_tokens for one end token only and not for stop tokens; such answers are ended by us (`outputs`).
    ends_here = stop.min_tokens > choice.num_tokens
    stops = [] if ends_here else list(stop.stop_token_ids)
    if not (ends_here or stop.ignore_eos):
        stops += [token for token in eos_token_ids[1:] if token not in stops]
    try:
        return SamplingParams(
            **_how_drawn(request, choice),
            end_id=eos_token_ids[0] if eos_token_ids else None,
            max_tokens=max_tokens,
            stop_token_ids=stops or None,
            include_stop_str_in_output=True,  # the token that ends an answer is its last
            ignore_eos=stop.ignore_eos or ends_here,
            presence_penalty=given.presence_penalty or None,
            frequency_penalty=given.frequency_penalty or None,
            repetition_penalty=given.repetition_penalty if given.repetition_penalty != 1.0 else None,
            # 0 would be none at all.
            logprobs=None if given.logprobs is None else max(given.logprobs, 1),
            guided_decoding=_guided(request.grammar) if has_grammar else None,
            detokenize=False,
            add_special_tokens=False,
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"TensorRT-LLM refuses it: {error}", param="sampling") from error


def _how_drawn(request: Request, choice: Choice) -> dict[str, Any]:
    given = request.sampling
    if given.temperature == 0:
        return {"top_k": 1}
    # With neither top_p nor top_k it takes the most likely token, and every request without a seed has seed 0.
    seed = (
        given.seed + choice.index if given.seed is not None else xxh3_64_intdigest(choice.engine_id.encode())
    )
    return {
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "min_p": given.min_p or None,
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
