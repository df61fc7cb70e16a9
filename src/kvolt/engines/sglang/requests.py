"""Converts requests to SGLang's: one per choice, each with its own sampling parameters.

Fields that SGLang cannot follow are refused before anything is submitted.
"""

from __future__ import annotations

import json
import re
from typing import Any

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Request, Sampling
from kvolt.engines.external.answers import Choice
from kvolt.engines.external.requests import (
    check_resumable,
    common_sampling,
    input_tokens,
    needs_prompt_logprobs,
    refuse_extra,
)
from kvolt.engines.sglang.host.messages import Facts, Generate

_GREEDY_BELOW = 1e-6
"""SGLang samples greedily below this temperature."""
_SPECIAL = re.compile(r"([.^$*+?{}\[\]\\|()])")
_ANY_OBJECT = '{"type": "object"}'


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < _GREEDY_BELOW or sampling.top_k == 1


def check_supported(request: Request, facts: Facts) -> None:
    """Unsupported if SGLang would not answer as the contract requires, InvalidRequest if it would refuse."""
    sampling = request.sampling
    if request.media:
        raise Unsupported("SGLang workers get media through an encode worker only", feature="media")
    refuse_extra(request, "SGLang")
    if request.grammar is not None and not facts.has_grammars:
        raise Unsupported("this SGLang runs without a grammar backend", feature="grammar")
    _check_random(request, facts)
    if request.has_prior_tokens:
        check_resumable(
            request,
            "SGLang",
            "SGLang counts resumed tokens as part of the prompt, to which its penalties do not apply",
        )
    _check_ranges(sampling)
    num_input = max(
        len(request.token_ids) + len(request.prior_tokens_of(index)) for index in request.open_choices
    )
    if num_input > facts.max_prompt:
        raise InvalidRequest(
            f"{num_input} tokens exceed SGLang's maximum prompt of {facts.max_prompt}",
            param="token_ids",
        )


def _check_random(request: Request, facts: Facts) -> None:
    sampling = request.sampling
    if is_greedy(sampling):
        return
    if sampling.seed is not None and not facts.is_seeded:
        raise Unsupported(
            "SGLang follows a seed only with engine_args.enable_deterministic_inference", feature="seed"
        )
    if sampling.min_p and facts.is_seeded:  # its sampler crashes on it
        raise Unsupported(
            "SGLang does not support min_p with enable_deterministic_inference", feature="min_p"
        )


def _check_ranges(sampling: Sampling) -> None:
    """Check SGLang's ranges now, instead of failing the request later."""
    ranges = {
        "temperature": 0.0 <= sampling.temperature < float("inf"),
        "top_p": 0.0 < sampling.top_p <= 1.0,
        "top_k": sampling.top_k is None or sampling.top_k == -1 or sampling.top_k >= 1,
        "min_p": 0.0 <= sampling.min_p <= 1.0,
        "presence_penalty": -2.0 <= sampling.presence_penalty <= 2.0,
        "frequency_penalty": -2.0 <= sampling.frequency_penalty <= 2.0,
        "repetition_penalty": 0.0 < sampling.repetition_penalty <= 2.0,
    }
    for name, is_right in ranges.items():
        if not is_right:
            raise InvalidRequest(f"{name}={getattr(sampling, name)} is out of SGLang's range", param=name)


def rid_of(choice: Choice) -> str:
    """SGLang's request id. Ends with a dot, since SGLang aborts all requests whose ids start with the given one."""
    return f"{choice.engine_id}."


def generation(choice: Choice, facts: Facts, fallback_seed: int, **fields: Any) -> Generate:
    """SGLang's request for a choice. `fallback_seed`: used without a seed; SGLang would use the same for all."""
    request, sampling = choice.request, choice.request.sampling
    needs_prompt = needs_prompt_logprobs(choice)
    nums_top = (sampling.logprobs, sampling.prompt_logprobs if needs_prompt else None)
    requested = [each for each in nums_top if each is not None]
    common: dict[str, Any] = {
        "stream": True,
        "return_logprob": bool(requested),
        "logprob_start_len": 0 if needs_prompt else -1,
        "top_logprobs_num": max(requested, default=0),
        "cache_salt": request.salt,
        "routed_dp_rank": request.routing.pinned_dp_rank if facts.num_ranks > 1 else None,
        "priority": request.routing.priority if facts.has_priorities else None,
        "lora_name": request.lora,
    }
    return Generate(
        rid=rid_of(choice),
        input_ids=input_tokens(request, choice.index),
        sampling=sampling_params(choice, facts, fallback_seed),
        fields=common | fields,
    )


def sampling_params(choice: Choice, facts: Facts, fallback_seed: int) -> dict[str, Any]:
    request, stop = choice.request, choice.request.stop
    sampling = request.sampling
    seed = None
    if facts.is_seeded:
        seed = fallback_seed if sampling.seed is None else (sampling.seed + choice.index) % 2**62
    num_before = choice.num_tokens
    return {
        "max_new_tokens": stop.max_tokens - num_before,
        # Not needed if EOS is ignored: SGLang then ignores stop tokens as well (see `outputs`).
        "min_new_tokens": 0 if stop.ignore_eos else max(stop.min_tokens - num_before, 0),
        "stop_token_ids": sorted(stop.stop_token_ids),
        **common_sampling(request),
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "sampling_seed": seed,
        "skip_special_tokens": False,
        **_grammar(request.grammar),
    }


def _grammar(grammar: Grammar | None) -> dict[str, str]:
    if grammar is None:
        return {}
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"json_schema": grammar.text}
        case GrammarKind.JSON_OBJECT:
            return {"json_schema": _ANY_OBJECT}
        case GrammarKind.REGEX:
            return {"regex": grammar.text}
        case GrammarKind.CHOICE:
            return {"regex": "|".join(map(_escaped, json.loads(grammar.text)))}
        case GrammarKind.EBNF:
            return {"ebnf": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            return {"structural_tag": grammar.text}


def _escaped(word: str) -> str:
    """A regular expression for a word. Escapes special characters only; grammar backends reject other escapes."""
    return "(" + _SPECIAL.sub(r"\\\1", word) + ")"
