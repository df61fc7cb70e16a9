"""Arguments of the SGLang adapter. SGLang's own arguments are passed through in `engine_args`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

_AtLeastOne = Annotated[int, Meta(ge=1)]


class SglangArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "sglang"`."""

    served_name: str | None = None
    """Model name in the API. Default: the name given as `model`."""
    engine_args: dict[str, Any] = {}
    """Fields of SGLang's ServerArgs: `tp_size`, `mem_fraction_static` ... (listed by `python -m
    sglang.launch_server --help`, with dashes)."""
    max_waiting: _AtLeastOne = 2048
    """Maximum number of waiting sequences; more are refused and retried on another worker."""
    kv_events: bool = True
    """Publish KV events for routers. Disable it if no router is KV-aware (round-robin)."""
    loras: dict[str, str] = {}
    """LoRA adapters to load at start: name to folder. Needs `engine_args.enable_lora`, with rank and target modules."""
    clear_s: Annotated[float, Meta(gt=0)] = 30.0
    """Time in seconds that `clear_kv` waits for the engine to be idle; SGLang clears its cache only then."""
    bootstrap_host: str = "127.0.0.1"
    """Address of a prefill worker for decode workers (SGLang's bootstrap server)."""
    hold_s: Annotated[float, Meta(gt=0)] = 300.0
    """Maximum time in seconds of a remote prefill, from the ticket to the end of the transfer."""
