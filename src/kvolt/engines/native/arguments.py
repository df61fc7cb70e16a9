"""NativeArguments: arguments of `engine = "native"`. None means chosen automatically."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_AtLeastOne = Annotated[int, Meta(ge=1)]
_Ranks = Annotated[int, Meta(ge=1, le=64)]


class NativeArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "native"`."""

    served_name: str | None = None
    """Model name for clients. Default: the name it was requested by."""
    device: str | None = None
    """`cpu`, `cuda` or `cuda:N`. Default: the first GPU if there is one. For several devices see
    `tensor_parallel`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute data type. auto: bfloat16 if the hardware multiplies it, else float32."""
    quantize: Literal["none", "int8"] = "none"
    """int8: weights in eight bits. Halves the memory and changes the generated tokens. CPU only."""
    block_size: _AtLeastOne = 16
    """Tokens per KV block."""
    kv_blocks: _AtLeastOne | None = None
    """Number of KV blocks. Default: as many as `kv_memory_gib` holds."""
    kv_memory_gib: Annotated[float, Meta(gt=0)] | None = None
    """KV cache size in GiB. Default: on a GPU 90 % of the memory left beside weights and steps; on a CPU 2
    GiB, or a quarter of the free memory if that is less."""
    context_length: _AtLeastOne | None = None
    """Maximum sequence length. Default: the model's; a lower value saves memory."""
    max_num_seqs: _AtLeastOne | None = None
    """Maximum sequences per step. Default: 256 on a GPU, 64 on a CPU."""
    max_batch_tokens: _AtLeastOne | None = None
    """Maximum tokens per step. Default: 8192 on a GPU, 2048 on a CPU and fewer for models above 200 M
    weights."""
    max_waiting: _AtLeastOne = 2048
    """Maximum number of waiting requests; more are refused as Overloaded."""
    tensor_parallel: _Ranks = 1
    """Number of processes that share the model, each on its own device or with a share of the CPU cores."""
    threads: _AtLeastOne | None = None
    """CPU threads per process. Default: from the environment."""
    cuda_graphs: bool = True
    """Run decode steps as CUDA graphs on a GPU. They are captured at start."""
    measure_steps: bool = True
    """Measure step times at start (1 to 2 s). They limit prefill chunks by predicted time and are registered
    for routing."""
    process: Literal["own", "thread"] = "own"
    """own: run steps in a separate process. thread: run them in a thread of the worker."""
    kv_events: bool = True
    """Report cached blocks to routers. Disable it to save the work if no router uses it (round-robin)."""
    loras: dict[str, str] = {}
    """LoRA adapters to load at start: name to folder."""
    step_log: str | None = None
    """File to which the stats of every step are appended, for `kvolt fit`."""
