"""Setup: resolves device, data type, step limits and KV memory that the arguments leave open.

All ranks resolve them alike. Default sizes follow from the model's shape and the free memory; allocates nothing.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

import torch

from kvolt.core.errors import ConfigError
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.kernels.operations import check_gpu_shape
from kvolt.models.config import ModelConfig
from kvolt.runtime.host.memory import free_bytes

log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class Setup:
    """Resolved settings of an engine."""

    device: torch.device
    dtype: str
    block_size: int
    max_num_seqs: int
    max_batch_tokens: int


def device_of(spec: EngineSpec, arguments: NativeArguments, rank: int) -> torch.device:
    """The device of a rank. ConfigError if it does not exist. Does not initialise it, since that would
    allocate memory."""
    named = arguments.device
    if spec.devices:
        if rank >= len(spec.devices):
            raise ConfigError(
                f"{rank + 1} ranks need as many devices, but {len(spec.devices)} are named",
                key="devices",
                remedy="name one device for each of tensor_parallel",
            )
        named = spec.devices[rank]
        named = f"cuda:{named}" if named.isdigit() else named
    elif named is not None and named.startswith("cuda:") and arguments.tensor_parallel > 1:
        raise ConfigError(
            f"{arguments.tensor_parallel} ranks cannot share {named}",
            key="args.device",
            remedy="name one device for each of tensor_parallel with devices",
        )
    if named == "cuda" or (named is None and torch.cuda.is_available()):
        named = f"cuda:{rank}"
    try:
        device = torch.device(named or "cpu")
    except RuntimeError as error:
        raise _unusable(str(named), error) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{device} does not exist: torch sees {torch.cuda.device_count()} GPUs",
            key="devices",
            remedy="lower tensor_parallel, or name existing devices; cpu needs none",
        )
    return device


def choose_setup(spec: EngineSpec, arguments: NativeArguments, config: ModelConfig, rank: int = 0) -> Setup:
    device = device_of(spec, arguments, rank)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        raise _unusable(str(device), error) from error
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(
            device
        )  # Triton, streams and graphs use the current device, not that of their tensors
        check_gpu_shape(config.head_dim, arguments.block_size)
    max_num_seqs = arguments.max_num_seqs or (256 if on_gpu else 64)
    return Setup(
        device=device,
        dtype=_dtype(arguments, on_gpu),
        block_size=arguments.block_size,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max(arguments.max_batch_tokens or step_tokens(config, on_gpu), max_num_seqs),
    )


def _unusable(named: str, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigError(
        f"device {named!r} cannot be used: {reason}", key="args.device", remedy="use cpu, cuda or cuda:N"
    )


def _dtype(arguments: NativeArguments, on_gpu: bool) -> str:
    if arguments.quantize == "int8":
        if on_gpu:
            raise ConfigError(
                "int8 weights are for the CPU", key="args.quantize", remedy="leave quantize at none"
            )
        if arguments.dtype not in ("auto", "bfloat16"):
            raise ConfigError(
                "int8 weights are multiplied with bfloat16", key="args.dtype", remedy="leave dtype at auto"
            )
        return "bfloat16"
    if arguments.dtype != "auto":
        if arguments.dtype == "bfloat16" and not on_gpu and not _has_bfloat16():
            log.warning("this CPU has no bfloat16 instructions; float32 is faster than emulated bfloat16")
            # torch warns of the same at the first product, with a stack trace.
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
        return arguments.dtype
    if on_gpu:
        return "bfloat16"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def _has_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or bool(torch.cpu.get_capabilities().get("bf16"))


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
