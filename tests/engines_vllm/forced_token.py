"""A logits processor of vLLM's kind, as a user would write one: says the token that a request names, and no other."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

ARGUMENT = "forced_token"


class ForcedToken(LogitsProcessor):
    """Loaded by vLLM, in each of its processes."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        if not isinstance(_token_of(sampling_params), int | None):
            raise ValueError(f"{ARGUMENT} is a token's number")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._tokens: dict[int, int] = {}
        """By place in the batch."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._tokens, batch_update, lambda params, *_: _token_of(params))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token in self._tokens.items():
            kept = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = kept
        return logits


def _token_of(params: Any) -> Any:
    return (params.extra_args or {}).get(ARGUMENT)
