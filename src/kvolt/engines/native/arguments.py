"""NativeArguments: what `engine = "native"` can be told. Every default is what most want; None means found out."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_AtLeastOne = Annotated[int, Meta(ge=1)]
_Ranks = Annotated[int, Meta(ge=1, le=64)]


class NativeArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "native"`."""

    served_name: str | None = None
    """What clients call the model; None for the name it was found by."""
    device: str | None = None
    """`cpu`, `cuda` or `cuda:N`; None for the first GPU where there is one. Of several, see `tensor_parallel`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What is computed in; auto is bfloat16 where the hardware multiplies it, else float32."""
    quantize: Literal["none", "int8"] = "none"
    """Weights in eight bits: half the memory, CPU only, and tokens are no longer those of the exact weights."""
    block_size: _AtLeastOne = 16
    kv_blocks: _AtLeastOne | None = None
    """KV blocks; None for as many as `kv_memory_gib` holds."""
    kv_memory_gib: Annotated[float, Meta(gt=0)] | None = None
    """None: 90 % of what a GPU has left beside weights and steps; on a CPU 2 GiB, or a quarter of what is free."""
    context_length: _AtLeastOne | None = None
    """Shorter than the model's own, to save memory; None for the model's."""
    max_num_seqs: _AtLeastOne | None = None
    """Sequences in one step; None for 256 on a GPU, 64 on a CPU."""
    max_batch_tokens: _AtLeastOne | None = None
    """Tokens in one step; None for 8192 on a GPU, 2048 on a CPU and fewer for models of more than 200 M weights."""
    max_waiting: _AtLeastOne = 2048
    tensor_parallel: _Ranks = 1
    """Processes that share the model, each with a device of its own, or a share of the cores."""
    threads: _AtLeastOne | None = None
    """CPU threads of each process; None for what the environment says."""
    cuda_graphs: bool = True
    measure_steps: bool = True
    """Measure some steps at start, for a second or so: prompts are cut by predicted time, and routers get the model."""
    process: Literal["own", "thread"] = "own"
    """Where steps run: in a process of their own, or in a thread of the worker."""
    kv_events: bool = True
    """Tell routers which blocks come and go; false saves the work where none of them asks (round-robin)."""
    loras: dict[str, str] = {}
    """Adapters to load at start: name to folder."""
    step_log: str | None = None
    """A file that every step's figures are appended to, for `kvolt fit`."""
