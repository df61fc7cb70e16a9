"""Tickets of prompts computed by TensorRT-LLM, as bytes in a Handoff.

Msgpack of known, bounded fields; nothing in it is executed. The contained state is opaque to kvolt and contains
addresses, so tickets are for workers that trust each other only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvolt.core.errors import MALFORMED, EngineFailed

MAX_TICKET_BYTES = 1 << 20
MAX_STATE_BYTES = 256 << 10
"""Maximum state of one choice; usually a few kilobytes (addresses of ranks and pools)."""
_MAX_ITEMS = 4096

_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Tokens = Annotated[tuple[_Token, ...], Meta(max_length=_MAX_ITEMS)]
_Id = Annotated[int, Meta(ge=0)]
_Text = Annotated[str, Meta(max_length=_MAX_ITEMS)]


class ContextState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """TensorRT-LLM's DisaggregatedParams of one computed choice, under its names."""

    first_gen_tokens: Annotated[_Tokens, Meta(min_length=1)]
    ctx_request_id: _Id
    opaque_state: Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)] | None = None
    draft_tokens: _Tokens | None = None
    disagg_request_id: _Id | None = None
    """This and the following fields exist in newer versions only."""
    ctx_dp_rank: _Id | None = None
    ctx_info_endpoint: _Text | Annotated[tuple[_Text, ...], Meta(max_length=_MAX_ITEMS)] | None = None


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    choices: Annotated[tuple[ContextState, ...], Meta(max_length=_MAX_ITEMS)] = ()
    """Empty: nothing is held, and the decode worker computes the prompt."""
    version: Literal[1] = 1
    engine: Literal["trtllm"] = "trtllm"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


def context_state(params: Any) -> ContextState:
    """State of a computed prompt. EngineFailed if a decode worker cannot continue from it."""
    if params is None or params.ctx_request_id is None or not params.first_gen_tokens:
        raise EngineFailed("TensorRT-LLM returned no context state for the prompt", engine="trtllm")
    try:
        # Without `builtin_types` text would be accepted as bytes.
        return msgspec.convert(params, ContextState, from_attributes=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise EngineFailed(f"the context state is invalid: {error}", engine="trtllm") from error


def encode_ticket(ticket: Ticket) -> bytes:
    """EngineFailed if the ticket is too long."""
    encoded = _encoder.encode(ticket)
    if len(encoded) > MAX_TICKET_BYTES:
        raise EngineFailed(
            f"a ticket of {len(encoded)} bytes exceeds {MAX_TICKET_BYTES}", engine="trtllm", reason="size"
        )
    return encoded


def decode_ticket(ticket: bytes) -> Ticket | None:
    """None if malformed or from another engine."""
    if len(ticket) > MAX_TICKET_BYTES:
        return None
    try:
        return _decoder.decode(ticket)
    except MALFORMED:
        return None


def generation_params(state: ContextState) -> Any:
    """DisaggregatedParams to continue after a prompt. EngineFailed for fields of a newer version."""
    from tensorrt_llm.llmapi import DisaggregatedParams

    fields = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in msgspec.structs.asdict(state).items()
        if value not in (None, ())
    }
    try:
        return DisaggregatedParams(request_type="generation_only", **fields)
    except TypeError as error:
        raise EngineFailed(f"a ticket of another TensorRT-LLM version: {error}", engine="trtllm") from error


def context_params() -> Any:
    """DisaggregatedParams of a context-only request."""
    from tensorrt_llm.llmapi import DisaggregatedParams

    return DisaggregatedParams(request_type="context_only")
