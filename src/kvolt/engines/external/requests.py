"""What adapters share about requests: engine-specific fields, sampling parameters, resumed requests.

External engines get the earlier output tokens of a resumed request as part of the prompt.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvolt.core.errors import Unsupported
from kvolt.core.request import Request, Sampling
from kvolt.engines.external.answers import Choice

_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
OUTPUT_PENALTIES = ("presence_penalty", "frequency_penalty")
"""Penalties that apply to output tokens only."""
PENALTIES = (*OUTPUT_PENALTIES, "repetition_penalty")
_NONE = Sampling()


def refuse_extra(request: Request, engine: str, known: Collection[str] = ()) -> None:
    """Unsupported for an unknown field; ignoring it would look like support."""
    for name in request.extra:
        if name not in known:
            raise Unsupported(f"{engine} does not support {name!r}", feature=name, param=name)


def common_sampling(request: Request) -> dict[str, Any]:
    """A new dict, which the caller may change."""
    sampling = request.sampling
    return {name: getattr(sampling, name) for name in _NAMES} | {"ignore_eos": request.stop.ignore_eos}


def first_tokens(request: Request) -> tuple[int, ...] | None:
    """First tokens sampled by remote prefill."""
    return request.handoff.first_tokens if request.handoff is not None else None


def is_resumed(request: Request) -> bool:
    """Whether the client has output tokens already."""
    return request.has_prior_tokens or first_tokens(request) is not None


def input_tokens(request: Request, index: int) -> list[int]:
    """Input for the next token of a choice: the prompt and earlier output tokens."""
    first = first_tokens(request)
    before = request.prior_tokens_of(index) or (first[index : index + 1] if first is not None else ())
    return [*request.token_ids, *before]


def check_resumable(request: Request, engine: str, penalties: str, of: Collection[str] = PENALTIES) -> None:
    """Unsupported if the continuation would differ from that of an uninterrupted request.

    `penalties`: error message if penalties would differ. `of`: the affected penalties."""
    if request.grammar is not None:
        raise Unsupported(
            f"{engine} cannot resume in the middle of a grammar", feature="resume with a grammar"
        )
    if any(getattr(request.sampling, name) != getattr(_NONE, name) for name in of):
        raise Unsupported(penalties, feature="resume with penalties")


def needs_prompt_logprobs(choice: Choice) -> bool:
    """Whether this choice must return prompt logprobs: the first choice of a request that is not resumed."""
    request = choice.request
    is_first = choice.index == min(request.open_choices)
    return request.sampling.prompt_logprobs is not None and is_first and not request.has_prior_tokens
