"""Arguments of the vLLM adapter. vLLM's own arguments are passed through in `engine_args`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.engines.vllm.plugins.tier_settings import VllmTiers

_AtLeastOne = Annotated[int, Meta(ge=1)]


class VllmArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "vllm"`."""

    served_name: str | None = None
    """Model name in the API. Default: the name given as `model`."""
    engine_args: dict[str, Any] = {}
    """Fields of vLLM's AsyncEngineArgs: `max_model_len`, `tensor_parallel_size`, `kv_transfer_config` ... (listed by
    `vllm serve --help`, with dashes)."""
    max_waiting: _AtLeastOne = 2048
    """Maximum number of waiting sequences; more are refused and retried on another worker."""
    kv_events: bool = True
    """Publish KV events for routers. Disable it if no router is KV-aware (round-robin)."""
    loras: dict[str, str] = {}
    """LoRA adapters to load at start: name to folder. Needs `engine_args.enable_lora`."""
    tiers: VllmTiers = VllmTiers()
    """Host and disk tiers for evicted KV (docs/engines.md)."""
    hold_s: Annotated[float, Meta(gt=0)] = 30.0
    """Time in seconds that a prefill worker holds a prompt's blocks without renewal by the decode worker, at most until
    the request's deadline."""
