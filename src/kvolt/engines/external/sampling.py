"""Sampling parameters that have the same names in vLLM, SGLang and their servers."""

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
    """A new dict, which the caller may change."""
    sampling = request.sampling
    return {name: getattr(sampling, name) for name in _NAMES} | {"ignore_eos": request.stop.ignore_eos}
