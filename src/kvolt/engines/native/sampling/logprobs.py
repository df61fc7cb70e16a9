"""Log probabilities of tokens from raw logits, before temperature, penalties and masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvolt.core.delta import TokenLogprobs
from kvolt.engines.native.sampling.draw import to_device

_CHUNK = {"cpu": 16}
_DEVICE_CHUNK = 256
"""Rows processed at a time: a float32 copy of all logits of a prompt would be very large."""


def measure(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Per row the log probability of its token, `top` token ids, and their log probabilities: int32 [n, 1 + 2
    top], floats as bits."""
    wide = logits.float()
    total = torch.logsumexp(wide, dim=-1, keepdim=True)
    own = wide.gather(1, tokens.unsqueeze(1)) - total
    if top == 0:
        return own.view(torch.int32)
    best, ids = wide.topk(min(top, wide.shape[1]), dim=-1)
    return torch.cat([own.view(torch.int32), ids.int(), (best - total).view(torch.int32)], dim=1)


def read(tokens: Sequence[int], measured: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Convert the result of `measure` on the host. `tops` may be smaller than the measured number."""
    num_measured = (measured.shape[1] - 1) // 2
    values = measured.view(torch.float32).tolist()
    ids = measured[:, 1 : 1 + num_measured].tolist()
    return [
        TokenLogprobs(token, row[0], tuple(zip(best[:top], row[1 + num_measured :][:top], strict=True)))
        for token, row, best, top in zip(tokens, values, ids, tops, strict=True)
    ]


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log probabilities of prompt tokens. Row i of `logits` [n, V] predicts `next_tokens[i]`."""
    if not next_tokens:
        return []
    tokens = to_device(np.array(next_tokens, dtype=np.int64), logits.device)
    chunk = _CHUNK.get(logits.device.type, _DEVICE_CHUNK)
    parts = [
        measure(rows, row_tokens, top)
        for rows, row_tokens in zip(torch.split(logits, chunk), torch.split(tokens, chunk), strict=True)
    ]
    measured = torch.cat(parts).cpu()
    return read(next_tokens, measured, [top] * len(next_tokens))
