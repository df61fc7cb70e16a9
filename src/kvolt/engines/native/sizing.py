"""Default step and KV cache sizes, from the model's shape and the free memory. Allocates nothing."""

from __future__ import annotations

import torch

from kvolt.models.config import ModelConfig
from kvolt.runtime.host.memory import free_bytes

_GIB = 1024**3
_CPU_KV_BYTES = 2 * _GIB
_GPU_KV_SHARE = 0.9
"""Share of the GPU memory left beside weights and the largest step; the rest is for libraries and
fragmentation."""

_GPU_STEP_TOKENS = 8192
_CPU_STEP_TOKENS = range(256, 2049)
_CPU_STEP_WEIGHTS = 4e11
"""Multiplications per CPU step, about a second on two cores: decodes wait that long behind a prompt."""

_BYTES_PER_DRAWN_LOGIT = 48
"""Bytes per logit of a top_p draw: float32 logits twice, sorted values and indices, float64 probabilities and
sums."""
MAX_COMPILING = 2
"""Grammars compiled concurrently; more would take CPU time from the steps."""


def step_tokens(config: ModelConfig, on_gpu: bool) -> int:
    """Tokens per step."""
    if on_gpu:
        return _GPU_STEP_TOKENS
    tokens = int(_CPU_STEP_WEIGHTS / config.num_weights) // 64 * 64
    return min(max(tokens, _CPU_STEP_TOKENS[0]), _CPU_STEP_TOKENS[-1])


def largest_step_bytes(
    config: ModelConfig, max_batch_tokens: int, max_num_seqs: int, itemsize: int, degree: int = 1
) -> int:
    """Upper bound of the tensor memory of one step on one rank.

    The largest point of a layer holds: hidden states and residual, raw and normed; q, k, v and the attention
    output, or gate, up and their product. After the layers: logits of all sequences and the sampler's
    buffers.
    """
    hidden = 4 * config.hidden_size
    attention = config.head_dim * 2 * (config.num_heads + config.num_kv_heads) // degree
    mlp = 3 * config.intermediate_size // degree
    layers = max_batch_tokens * (hidden + max(attention, mlp)) * itemsize
    logits = max_num_seqs * config.vocab_size * (_BYTES_PER_DRAWN_LOGIT + 2 * 4)
    return layers + logits


def memory_for_kv(device: torch.device, step_bytes: int) -> int:
    """GPU: most of the memory left after loading and beside a step. CPU: a share of the free memory."""
    if device.type != "cuda":
        return min(_CPU_KV_BYTES, free_bytes() // 4)
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int((free - step_bytes) * _GPU_KV_SHARE))
