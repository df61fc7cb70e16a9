"""Arguments of the TensorRT-LLM adapter. Its own arguments are passed through in `llm_args`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

_AtLeastOne = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0)]


class Seeds(StrEnum):
    """Support of seeds by TensorRT-LLM's sampler."""

    NONE = "none"
    """One generator for all requests (the default sampler): requests with a seed are refused."""
    KEPT = "kept"
    """One generator per request: a request cannot be resumed."""
    BY_POSITION = "by_position"
    """Random numbers depend on the position of the token: a request can be resumed."""


class TrtllmArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "trtllm"`."""

    served_name: str | None = None
    """Model name in the API. Default: the name given as `model`."""
    llm_args: dict[str, Any] = {}
    """Fields of TensorRT-LLM's TorchLlmArgs: `max_seq_len`, `kv_cache_config`, `tensor_parallel_size` ... (as in
    `trtllm-serve --config`)."""
    max_waiting: _AtLeastOne = 2048
    """Maximum number of waiting sequences; more are refused and retried on another worker."""
    kv_events: bool = True
    """Publish KV events for routers. Disable it if no router is KV-aware (round-robin)."""
    loras: dict[str, str] = {}
    """LoRA adapters available from the start: name to folder."""
    hold_s: _Seconds = 30.0
    """Time in seconds that a prefill worker holds a prompt's blocks."""
    poll_s: _Seconds = 0.02
    """Interval in seconds at which KV events and statistics are polled."""
    stall_s: _Seconds = 300.0
    """Time in seconds with running requests and no output after which the engine counts as dead."""
    seeds: Seeds = Seeds.NONE
    """Support of seeds. `python -m kvolt.testing.engines.trtllm_smoke` determines it."""
