"""Resumed requests: external engines get the earlier output tokens as part of the prompt."""

from __future__ import annotations

from collections.abc import Collection

from kvolt.core.errors import Unsupported
from kvolt.core.request import Request, Sampling
from kvolt.engines.external.answers import Choice

OUTPUT_PENALTIES = ("presence_penalty", "frequency_penalty")
"""Penalties that apply to output tokens only."""
PENALTIES = (*OUTPUT_PENALTIES, "repetition_penalty")
_NONE = Sampling()


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
