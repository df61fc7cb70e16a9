"""VllmArguments: what `engine = "vllm"` can be told. vLLM's own arguments go in `engine_args`, as they are."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.engines.vllm.plugins.tier_settings import VllmTiers

_AtLeastOne = Annotated[int, Meta(ge=1)]


class VllmArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "vllm"`."""

    served_name: str | None = None
    """What clients call the model; None for the name it was found by."""
    engine_args: dict[str, Any] = {}
    """Of vLLM's AsyncEngineArgs, by name, with whatever structure they have: `max_model_len`, `tensor_parallel_size`,
    `kv_transfer_config` ... (`vllm serve --help` tells them, with dashes)."""
    max_waiting: _AtLeastOne = 2048
    """Sequences beyond those that run; more are refused, and go elsewhere."""
    kv_events: bool = True
    """Tell routers which blocks come and go; false where none of them asks (round-robin)."""
    loras: dict[str, str] = {}
    """Adapters to load at start: name to folder. Needs `engine_args.enable_lora`."""
    tiers: VllmTiers = VllmTiers()
    """KV that leaves vLLM's memory is kept in the host's and on a disk (docs/engines.md)."""
    hold_s: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds that a prefill worker holds the blocks of a prompt for a decode worker that does not renew the hold,
    and never beyond the request's deadline."""
