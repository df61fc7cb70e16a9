"""How large an engine's steps and its KV cache are, where nobody said: from the model's shape and what memory is left.

Arithmetic, but for the questions to the device and the system. Knows no weights and allocates nothing.
"""

from __future__ import annotations

import torch

from kvolt.models.config import ModelConfig
from kvolt.runtime.host.memory import free_bytes

_GIB = 1024**3
_CPU_KV_BYTES = 2 * _GIB
_GPU_KV_SHARE = 0.9
"""Of what a GPU has left beside weights and the largest step; the rest is for libraries and fragments."""

_GPU_STEP_TOKENS = 8192
_CPU_STEP_TOKENS = range(256, 2049)
_CPU_STEP_WEIGHTS = 4e11
"""Products of a step on a CPU: a second or so on two cores, since decodes wait that long behind a prompt."""

_BYTES_PER_DRAWN_LOGIT = 48
"""A draw with top_p: logits in float32 twice, sorted with indices, probabilities and their sums in float64."""


def step_tokens(config: ModelConfig, on_gpu: bool) -> int:
    """Tokens in one step."""
    if on_gpu:
        return _GPU_STEP_TOKENS
    tokens = int(_CPU_STEP_WEIGHTS / config.num_weights) // 64 * 64
    return min(max(tokens, _CPU_STEP_TOKENS[0]), _CPU_STEP_TOKENS[-1])


def largest_step_bytes(
    config: ModelConfig, max_batch_tokens: int, max_num_seqs: int, itemsize: int, degree: int = 1
) -> int:
    """What the tensors of one step come to at most, on one rank.

    At a layer's widest place there are: hidden states and residual, normed and not; q, k, v and what attention
    gives, or gate, up and their product. After the layers: logits of every sequence, and what drawing takes.
    """
    hidden = 4 * config.hidden_size
    attention = config.head_dim * 2 * (config.num_heads + config.num_kv_heads) // degree
    mlp = 3 * config.intermediate_size // degree
    layers = max_batch_tokens * (hidden + max(attention, mlp)) * itemsize
    logits = max_num_seqs * config.vocab_size * (_BYTES_PER_DRAWN_LOGIT + 2 * 4)
    return layers + logits


def memory_for_kv(device: torch.device, step_bytes: int) -> int:
    """On a GPU most of what is left after loading and beside a step; on a CPU a part of what is free."""
    if device.type != "cuda":
        return min(_CPU_KV_BYTES, free_bytes() // 4)
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int((free - step_bytes) * _GPU_KV_SHARE))
