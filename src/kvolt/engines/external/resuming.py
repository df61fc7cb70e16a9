"""Requests whose clients have some of the answer already: an engine of others is given it as part of the prompt."""

from __future__ import annotations

from collections.abc import Collection

from kvolt.core.errors import Unsupported
from kvolt.core.request import Request, Sampling
from kvolt.engines.external.answers import Choice

OUTPUT_PENALTIES = ("presence_penalty", "frequency_penalty")
"""Of what was said, and not of the prompt."""
PENALTIES = (*OUTPUT_PENALTIES, "repetition_penalty")
_NONE = Sampling()


def first_tokens(request: Request) -> tuple[int, ...] | None:
    """Those that prefill has told."""
    return request.handoff.first_tokens if request.handoff is not None else None


def is_under_way(request: Request) -> bool:
    """Whether its client has tokens of it."""
    return request.is_resumed or first_tokens(request) is not None


def given_tokens(request: Request, index: int) -> list[int]:
    """All that there is before the next token of a choice: the prompt, and what its client has."""
    first = first_tokens(request)
    before = request.resumed(index) or (first[index : index + 1] if first is not None else ())
    return [*request.token_ids, *before]


def check_resumable(request: Request, engine: str, penalties: str, of: Collection[str] = PENALTIES) -> None:
    """Unsupported for one that would not go on as if nothing had happened.

    `penalties`: why those of the engine would not be the same after what it takes for the prompt. `of`: which ones."""
    if request.grammar is not None:
        raise Unsupported(
            f"{engine} cannot go on in the middle of a grammar", feature="resume with a grammar"
        )
    if any(getattr(request.sampling, name) != getattr(_NONE, name) for name in of):
        raise Unsupported(penalties, feature="resume with penalties")


def asks_prompt_logprobs(choice: Choice) -> bool:
    """Once, with the first choice; not for a client that has them already."""
    request = choice.request
    is_first = choice.index == min(request.open_choices)
    return request.sampling.prompt_logprobs is not None and is_first and not request.is_resumed
