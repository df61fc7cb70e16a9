"""Rotary embedding in plain torch, in place, with the arguments of vLLM's kernel."""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    cos, sin = (part.unsqueeze(1).float() for part in cos_sin_cache[positions.flatten()].chunk(2, -1))
    for heads in (query, key):
        if heads is None:
            continue
        view = heads.view(heads.shape[0], -1, head_size)
        width = cos.shape[-1] * 2
        turned = view[..., :width].float()
        if is_neox:
            left, right = turned.chunk(2, -1)
            out = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        else:
            left, right = turned[..., ::2], turned[..., 1::2]
            out = torch.stack([left * cos - right * sin, right * cos + left * sin], -1).flatten(-2)
        view[..., :width] = out.to(view.dtype)
