"""A request in SGLang's words: one of its requests for each choice, with sampling parameters of its own.

Owns which of our fields it can follow. What it cannot is refused here, before it has anything of the request.
"""

from __future__ import annotations

import json
import re
from typing import Any

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Request, Sampling
from kvolt.engines.external.answers import Choice
from kvolt.engines.external.extras import refuse_extra
from kvolt.engines.external.resuming import asks_prompt_logprobs, check_resumable, given_tokens
from kvolt.engines.external.sampling import common_sampling
from kvolt.engines.sglang.host.messages import Facts, Generate

_GREEDY_BELOW = 1e-6
"""SGLang takes the likeliest token at temperatures below."""
_SPECIAL = re.compile(r"([.^$*+?{}\[\]\\|()])")
_ANY_OBJECT = '{"type": "object"}'


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < _GREEDY_BELOW or sampling.top_k == 1


def check_supported(request: Request, facts: Facts) -> None:
    """Unsupported for what SGLang would not answer as the contract says, InvalidRequest for what it refuses."""
    sampling = request.sampling
    if request.media:
        raise Unsupported("media come to SGLang workers through an encode worker only", feature="media")
    refuse_extra(request, "SGLang")
    if sampling.allowed_token_ids is not None:
        raise Unsupported("SGLang has no list of allowed tokens", feature="allowed_token_ids")
    if request.grammar is not None and not facts.has_grammars:
        raise Unsupported("this SGLang runs without a grammar backend", feature="grammar")
    _check_random(request, facts)
    if request.is_resumed:
        check_resumable(
            request,
            "SGLang",
            "SGLang counts what it goes on after as the prompt, to which its penalties do not apply",
        )
    _check_ranges(sampling)
    most_given = max(len(request.token_ids) + len(request.resumed(index)) for index in request.open_choices)
    if most_given > facts.max_prompt:
        raise InvalidRequest(
            f"{most_given} tokens are over the {facts.max_prompt} that SGLang takes as a prompt",
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
    if sampling.min_p and facts.is_seeded:  # its sampler asserts that there is none, and dies of it
        raise Unsupported("SGLang has no min_p with enable_deterministic_inference", feature="min_p")


def _check_ranges(sampling: Sampling) -> None:
    """As SGLang has them: told now, and not by a request that fails later."""
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
            raise InvalidRequest(f"SGLang takes no {name} of {getattr(sampling, name)}", param=name)


def rid_of(choice: Choice) -> str:
    """Ends with a dot: SGLang aborts all requests whose names begin with the one that it is told."""
    return f"{choice.engine_id}."


def generation(choice: Choice, facts: Facts, fallback_seed: int, **fields: Any) -> Generate:
    """`fallback_seed`: of a request that names none. With seeds SGLang would take the same one for all of them."""
    request, sampling = choice.request, choice.request.sampling
    asks_prompt = asks_prompt_logprobs(choice)
    wanted = (sampling.logprobs, sampling.prompt_logprobs if asks_prompt else None)
    asked = [each for each in wanted if each is not None]
    given: dict[str, Any] = {
        "stream": True,
        "return_logprob": bool(asked),
        "logprob_start_len": 0 if asks_prompt else -1,
        "top_logprobs_num": max(asked, default=0),
        "cache_salt": request.salt,
        "routed_dp_rank": request.routing.pinned_dp_rank if facts.num_ranks > 1 else None,
        "priority": request.routing.priority if facts.has_priorities else None,
        "lora_name": request.lora,
    }
    return Generate(
        rid=rid_of(choice),
        input_ids=given_tokens(request, choice.index),
        sampling=sampling_params(choice, facts, fallback_seed),
        fields=given | fields,
    )


def sampling_params(choice: Choice, facts: Facts, fallback_seed: int) -> dict[str, Any]:
    request, stop = choice.request, choice.request.stop
    given = request.sampling
    seed = None
    if facts.is_seeded:
        seed = fallback_seed if given.seed is None else (given.seed + choice.index) % 2**62
    num_before = choice.num_tokens
    return {
        "max_new_tokens": stop.max_tokens - num_before,
        # It has no use for these where EOS is ignored: then it ignores stop tokens as well (see `outputs`).
        "min_new_tokens": 0 if stop.ignore_eos else max(stop.min_tokens - num_before, 0),
        "stop_token_ids": sorted(stop.stop_token_ids),
        **common_sampling(request),
        "top_k": -1 if given.top_k is None else given.top_k,
        "logit_bias": {str(token): bias for token, bias in given.logit_bias.items()} or None,
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
            return {"regex": "|".join(map(_exactly, json.loads(grammar.text)))}
        case GrammarKind.EBNF:
            return {"ebnf": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            return {"structural_tag": grammar.text}


def _exactly(word: str) -> str:
    """A regular expression for a word. Only what has a meaning is escaped: grammar backends know no other escapes."""
    return "(" + _SPECIAL.sub(r"\\\1", word) + ")"
