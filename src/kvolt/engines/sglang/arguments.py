"""SglangArguments: what `engine = "sglang"` can be told. SGLang's own arguments go in `engine_args`, as they are."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

_AtLeastOne = Annotated[int, Meta(ge=1)]


class SglangArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "sglang"`."""

    served_name: str | None = None
    """What clients call the model; None for the name it was found by."""
    engine_args: dict[str, Any] = {}
    """Of SGLang's ServerArgs, by name, with whatever structure they have: `tp_size`, `mem_fraction_static` ...
    (`python -m sglang.launch_server --help` tells them, with dashes)."""
    max_waiting: _AtLeastOne = 2048
    """Sequences beyond those that run; more are refused, and go elsewhere."""
    kv_events: bool = True
    """Tell routers which blocks come and go; false where none of them asks (round-robin)."""
    loras: dict[str, str] = {}
    """Adapters to load at start: name to folder. Needs `engine_args.enable_lora`, with its rank and target modules."""
    clear_s: Annotated[float, Meta(gt=0)] = 30.0
    """How long `clear_kv` waits for a moment without requests: SGLang forgets its blocks at no other time."""
    bootstrap_host: str = "127.0.0.1"
    """Of a prefill worker: under which decode workers reach this machine."""
    hold_s: Annotated[float, Meta(gt=0)] = 300.0
    """How long a prompt for others may take, from the ticket to the end of its transfer."""
