"""Arguments of an attached server."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class RemoteArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "remote"`: a running vLLM or SGLang server, attached over HTTP."""

    url: str = "http://127.0.0.1:8000"
    """URL of the server, with or without /v1."""
    kind: Literal["auto", "vllm", "sglang"] = "auto"
    """Kind of server. `auto` detects it."""
    model: str | None = None
    """Model name on the server, if it serves several."""
    tokenizer: str | None = None
    """Folder with tokenizer.json, or a model name. Default: the server's model, if its files are on this machine."""
    kv_events: str | None = None
    """Endpoint of the server's KV events, as tcp://HOST:PORT. Default: none."""
    kv_events_replay: str | None = None
    """Endpoint of the replay of missed KV events."""
    kv_events_topic: str = ""
    """Topic of the KV events; empty for all."""
    api_key: str | None = None
    """The server's API key (--api-key)."""
    block_size: Count | None = None
    """Tokens per KV block, if the server does not report it."""
    kv_blocks: Count | None = None
    """Number of KV blocks, if the server does not report it."""
    max_num_seqs: Count | None = None
    """Maximum number of running requests, if the server does not report it. Default: 256."""
    max_waiting: Count = 1024
    """Maximum number of choices without a token; more are refused as Overloaded."""
    connect_timeout_s: Seconds = 5.0
    first_token_timeout_s: Seconds = 600.0
    """Timeout of the first token in seconds, including the server's queue."""
    idle_timeout_s: Seconds = 60.0
    """Timeout between two tokens in seconds."""
    start_timeout_s: Seconds | None = 600.0
    """Time in seconds to wait for the server at start; null: no limit."""
    probe_interval_s: Seconds = 1.0
    """Interval of health and load probes in seconds."""
    probe_timeout_s: Seconds = 5.0
    away_after: Count = 3
    """Failed probes in a row after which the server counts as unavailable. A refused connection counts at once."""
