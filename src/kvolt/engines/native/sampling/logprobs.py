"""Log probabilities of tokens, those of the raw logits: before temperature, penalties and masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvolt.core.delta import TokenLogprobs
from kvolt.engines.native.sampling.draw import to_device

_CHUNK = {"cpu": 16}
_DEVICE_CHUNK = 256
"""Rows at a time: a prompt's logits as a float32 copy would be the largest thing in memory."""


def measure(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Per row, as float32 and int32 bits: the token's figure, `top` token ids, their figures. [n, 1 + 2 top]."""
    wide = logits.float()
    total = torch.logsumexp(wide, dim=-1, keepdim=True)
    own = wide.gather(1, tokens.unsqueeze(1)) - total
    if top == 0:
        return own.view(torch.int32)
    best, ids = wide.topk(min(top, wide.shape[1]), dim=-1)
    return torch.cat([own.view(torch.int32), ids.int(), (best - total).view(torch.int32)], dim=1)


def read(tokens: Sequence[int], measured: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """What `measure` gave, on the host. A row may want fewer than were measured."""
    num_measured = (measured.shape[1] - 1) // 2
    figures = measured.view(torch.float32).tolist()
    ids = measured[:, 1 : 1 + num_measured].tolist()
    return [
        TokenLogprobs(token, row[0], tuple(zip(best[:top], row[1 + num_measured :][:top], strict=True)))
        for token, row, best, top in zip(tokens, figures, ids, tops, strict=True)
    ]


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of each row's next token. logits: [n, V], row i being those after which `next_tokens[i]` comes."""
    if not next_tokens:
        return []
    tokens = to_device(np.array(next_tokens, dtype=np.int64), logits.device)
    chunk = _CHUNK.get(logits.device.type, _DEVICE_CHUNK)
    parts = [
        measure(some, theirs, top)
        for some, theirs in zip(torch.split(logits, chunk), torch.split(tokens, chunk), strict=True)
    ]
    measured = torch.cat(parts).cpu()
    return read(next_tokens, measured, [top] * len(next_tokens))
