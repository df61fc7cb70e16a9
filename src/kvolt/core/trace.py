"""Trace records: arrival, lengths and block ids of requests, without text."""

from __future__ import annotations

import msgspec


class TraceRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a trace. Field names follow the public Mooncake traces, which load unchanged."""

    timestamp: float
    """Arrival in milliseconds from the start of the trace."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    """One id per block of the prompt, including a partial last block; equal leading ids mean an equal prefix."""
    block_size: int = 512
    session: str | None = None
    tenant: str | None = None
    delay: float | None = None
    """Milliseconds from the end of the session's previous turn to this one; None: use the timestamp only."""
