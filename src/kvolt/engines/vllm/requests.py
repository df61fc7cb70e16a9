"""A request in vLLM's words: one of its requests for each choice, with sampling parameters of its own.

Owns which of our fields it can follow. What it cannot is refused here, before it has anything of the request.
"""

from __future__ import annotations

import json
from typing import Any

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Request
from kvolt.engines.foreign.answers import Choice
from kvolt.engines.kv_formats.translator import SALT_TAG
from kvolt.engines.vllm.extras import RESUMED, extra_args
from kvolt.engines.vllm.prompt_embeds import EMBEDS, embedded_input
from kvolt.engines.vllm.refusals import refusals


def check_supported(request: Request) -> None:
    """Unsupported for what vLLM would not answer as the contract says."""
    if request.media:
        raise Unsupported("media come to vLLM workers through an encode worker only", feature="media")
    is_resumed = request.is_resumed or _first_tokens(request) is not None
    sampling = request.sampling
    if is_resumed and request.grammar is not None:
        raise Unsupported("vLLM cannot go on in the middle of a grammar", feature="resume with a grammar")
    if is_resumed and (sampling.presence_penalty or sampling.frequency_penalty):
        raise Unsupported(
            "vLLM counts what it goes on after as the prompt, to which these penalties do not apply",
            feature="resume with penalties",
        )


def _first_tokens(request: Request) -> tuple[int, ...] | None:
    return request.handoff.first_tokens if request.handoff is not None else None


def given_tokens(request: Request, index: int) -> list[int]:
    """All that there is before the next token of a choice: the prompt, and what its client has."""
    first = _first_tokens(request)
    before = request.resumed(index) or (first[index : index + 1] if first is not None else ())
    return [*request.token_ids, *before]


def sampling_params(
    choice: Choice, *, kv_transfer: dict[str, Any] | None = None, only_prompt: bool = False
) -> Any:
    """vLLM's SamplingParams of a choice. `only_prompt`: for others to go on with, of which one token comes."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    request = choice.request
    given, stop = request.sampling, request.stop
    num_before = choice.num_tokens
    extra = extra_args(request)
    if kv_transfer is not None:
        extra["kv_transfer_params"] = kv_transfer
    if num_before and given.seed is not None:
        extra[RESUMED] = num_before
    try:
        return SamplingParams(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k or 0,
            min_p=given.min_p,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
            repetition_penalty=given.repetition_penalty,
            # As vLLM itself does for the choices of one request.
            seed=None if given.seed is None else given.seed + choice.index,
            max_tokens=1 if only_prompt else stop.max_tokens - num_before,
            min_tokens=0 if only_prompt else max(stop.min_tokens - num_before, 0),
            stop_token_ids=list(stop.stop_token_ids),
            ignore_eos=stop.ignore_eos,
            logprobs=None if only_prompt else given.logprobs,
            prompt_logprobs=_prompt_logprobs(request, choice, only_prompt),
            logit_bias=dict(given.logit_bias) or None,
            allowed_token_ids=None if given.allowed_token_ids is None else list(given.allowed_token_ids),
            structured_outputs=_structured(request.grammar),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
            extra_args=extra or None,
        )
    except refusals() as error:
        raise InvalidRequest(f"vLLM refuses it: {error}", param="sampling") from error


def _prompt_logprobs(request: Request, choice: Choice, only_prompt: bool) -> int | None:
    """Once, with the first choice; not for a client that has them already."""
    if only_prompt or choice.index != min(request.open_choices) or request.is_resumed:
        return None
    return request.sampling.prompt_logprobs


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


def prompt_input(request: Request, index: int, model_config: Any = None) -> Any:
    """`model_config`: vLLM's, by which vectors are held against the model. ValueError where they do not fit."""
    from vllm.inputs.engine import tokens_input

    salt = None if request.salt is None else f"{SALT_TAG}{request.salt}"
    if EMBEDS in request.extra:
        return embedded_input(request, index, model_config, salt)
    return tokens_input(given_tokens(request, index), cache_salt=salt)
