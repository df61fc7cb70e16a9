"""What can be said about a server that is attached."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class RemoteArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that already runs, vLLM or SGLang, attached over HTTP. Nothing is computed here."""

    url: str = "http://127.0.0.1:8000"
    """Of the server; /v1 at its end is no harm."""
    kind: Literal["auto", "vllm", "sglang"] = "auto"
    """What it speaks. `auto` asks it."""
    model: str | None = None
    """Its name there, where it serves several."""
    tokenizer: str | None = None
    """A folder with tokenizer.json, or a model's name; without it the server's own model is looked for here."""
    kv_events: str | None = None
    """Where it publishes its KV events, as tcp://HOST:PORT."""
    kv_events_replay: str | None = None
    """Where those that were missed can be had again."""
    kv_events_topic: str = ""
    """Events of other topics are passed over; empty for all."""
    api_key: str | None = None
    """As its --api-key."""
    block_size: Count | None = None
    """Tokens in a block of KV, for a server that does not say."""
    kv_blocks: Count | None = None
    """How many blocks it has, for a server that does not say."""
    max_num_seqs: Count | None = None
    """Requests that it computes at once, for a server that does not say (256 if nobody does)."""
    max_waiting: Count = 1024
    """Choices under way that have no token yet; more are refused as Overloaded."""
    connect_timeout_s: Seconds = 5.0
    first_token_timeout_s: Seconds = 600.0
    """From the request to its first token, the time in the queue of the server included."""
    idle_timeout_s: Seconds = 60.0
    """Between two tokens of an answer."""
    start_timeout_s: Seconds | None = 600.0
    """To wait for a server that is not there yet; null for ever."""
    probe_interval_s: Seconds = 1.0
    """Between two looks at its health and load."""
    probe_timeout_s: Seconds = 5.0
    away_after: Count = 3
    """Probes without an answer before it counts as away. One whose connection is refused is away at once."""
