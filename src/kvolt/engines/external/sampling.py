"""How tokens are chosen, in the words that vLLM and SGLang have in common, as do the servers of both."""

from __future__ import annotations

from typing import Any

from kvolt.core.request import Request

_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def common_sampling(request: Request) -> dict[str, Any]:
    """A dict of the caller's own."""
    sampling = request.sampling
    return {name: getattr(sampling, name) for name in _NAMES} | {"ignore_eos": request.stop.ignore_eos}
