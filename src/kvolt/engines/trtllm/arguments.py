"""TrtllmArguments: what `engine = "trtllm"` can be told. TensorRT-LLM's own arguments go in `llm_args`, as they are."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

_AtLeastOne = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0)]


class Seeds(StrEnum):
    """Whether the same request has the same tokens again."""

    NONE = "none"
    """Its default sampler draws for all requests from one generator: a request with a seed is refused."""
    KEPT = "kept"
    """By request, from its beginning on: an answer that was begun elsewhere cannot be gone on with."""
    BY_POSITION = "by_position"
    """By the position of a token: it can."""


class TrtllmArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "trtllm"`."""

    served_name: str | None = None
    """What clients call the model; None for the name it was found by."""
    llm_args: dict[str, Any] = {}
    """Of TensorRT-LLM's TorchLlmArgs, by name, with whatever structure they have: `max_seq_len`, `kv_cache_config`,
    `tensor_parallel_size` ... (those of `trtllm-serve --config`)."""
    max_waiting: _AtLeastOne = 2048
    """Sequences beyond those that run; more are refused, and go elsewhere."""
    kv_events: bool = True
    """Tell routers which blocks come and go; false where none of them asks (round-robin)."""
    loras: dict[str, str] = {}
    """Adapters that requests may choose from the start: name to folder."""
    hold_s: _Seconds = 30.0
    """How long a prompt that was computed for others is kept for them."""
    poll_s: _Seconds = 0.02
    """How often TensorRT-LLM is asked for its KV events and figures, which it does not send by itself."""
    stall_s: _Seconds = 300.0
    """Requests run and nothing has come for so long: it is taken for dead."""
    seeds: Seeds = Seeds.NONE
    """What its sampler makes of a request's seed. `python -m kvolt.testing.engines.trtllm_smoke` finds out."""
