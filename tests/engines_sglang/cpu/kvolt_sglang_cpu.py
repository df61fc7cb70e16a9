"""A plugin of SGLang: what it needs to run and to follow seeds on a CPU without its own kernels.

It lets requests have a seed only with attention that it knows to be deterministic, all of which needs a GPU; on a CPU
`torch_native` is, for one thread. The hash that its sampler draws from is compiled: here it is in plain torch.
"""

import functools

_MASK = 0xFFFFFFFF


def register() -> None:
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers import sampler

    for known in (
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if "torch_native" not in known:
            known.append("torch_native")
    # Kernels in place of torch's own, for GPUs only.
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None
    sampler.murmur_hash32 = _murmur_hash32
    # On ARM it binds threads by its CPU kernels, asked for or not.
    bootstrap._is_cpu_arm64 = False
    _unpin()


def _unpin() -> None:
    """Its LoRA layers ask for pinned memory, of which there is none without a GPU."""
    import torch

    if torch.cuda.is_available():
        return
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self


def _unpinned(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _murmur_hash32(seed, positions, columns):
    """MurmurHash3 of a seed of 64 bits, a position and a column, as in sglang.kernels.ops.sampling.murmur_hash."""
    import torch

    wide = seed.view(torch.int64)
    parts = (wide & _MASK, (wide >> 32) & _MASK, positions.to(torch.int64) & _MASK)
    state = torch.zeros_like(wide)
    for part in parts:
        state = _mix(state, part)
    state = _mix(state.unsqueeze(1), columns.to(torch.int64).unsqueeze(0)) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return state ^ (state >> 16)


def _mix(state, part):
    part = _rotated((part * 0xCC9E2D51) & _MASK, 15)
    state = _rotated(state ^ ((part * 0x1B873593) & _MASK), 13)
    return (state * 5 + 0xE6546B64) & _MASK


def _rotated(value, bits):
    return ((value << bits) | (value >> (32 - bits))) & _MASK
