"""Tickets: what a prompt that TensorRT-LLM has computed for others is known by, as bytes in a Handoff.

Owns their form and their bounds: msgpack of known fields and nothing that could be run. The state inside is
TensorRT-LLM's own and is read by it alone; it names addresses, so it is only good among workers that trust each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvolt.core.errors import EngineFailed

MAX_TICKET_BYTES = 1 << 20
MAX_STATE_BYTES = 256 << 10
"""Of one choice. What it names are addresses of ranks and pools: a few kilobytes."""
_MOST = 4096

_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Tokens = Annotated[tuple[_Token, ...], Meta(max_length=_MOST)]
_Id = Annotated[int, Meta(ge=0)]
_Text = Annotated[str, Meta(max_length=_MOST)]


class ContextState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """DisaggregatedParams of one choice whose prompt is computed, by their names there."""

    first_gen_tokens: Annotated[_Tokens, Meta(min_length=1)]
    ctx_request_id: _Id
    opaque_state: Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)] | None = None
    draft_tokens: _Tokens | None = None
    disagg_request_id: _Id | None = None
    """This and what follows are of newer versions, and only there where they are."""
    ctx_dp_rank: _Id | None = None
    ctx_info_endpoint: _Text | Annotated[tuple[_Text, ...], Meta(max_length=_MOST)] | None = None


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    choices: Annotated[tuple[ContextState, ...], Meta(max_length=_MOST)] = ()
    """None at all: nothing is kept, and who takes the request over computes its prompt."""
    version: Literal[1] = 1
    engine: Literal["trtllm"] = "trtllm"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


def state_of(params: Any) -> ContextState:
    """What TensorRT-LLM says of a computed prompt. EngineFailed for one that nobody could go on with."""
    if params is None or params.ctx_request_id is None or not params.first_gen_tokens:
        raise EngineFailed("TensorRT-LLM gave nothing to go on with after a prompt", engine="trtllm")
    endpoint = getattr(params, "ctx_info_endpoint", None)
    found = {
        "first_gen_tokens": tuple(params.first_gen_tokens),
        "ctx_request_id": params.ctx_request_id,
        "opaque_state": params.opaque_state,
        "draft_tokens": tuple(params.draft_tokens) if params.draft_tokens else None,
        "disagg_request_id": getattr(params, "disagg_request_id", None),
        "ctx_dp_rank": getattr(params, "ctx_dp_rank", None),
        "ctx_info_endpoint": tuple(endpoint) if isinstance(endpoint, list) else endpoint,
    }
    try:
        return msgspec.convert(found, ContextState, builtin_types=(bytes,))  # else text would pass for bytes
    except msgspec.ValidationError as error:
        raise EngineFailed(f"a prompt cannot be handed over: {error}", engine="trtllm") from error


def encode_ticket(ticket: Ticket) -> bytes:
    """EngineFailed for one that is too long to travel."""
    encoded = _encoder.encode(ticket)
    if len(encoded) > MAX_TICKET_BYTES:
        raise EngineFailed(
            f"a ticket of {len(encoded)} bytes is over {MAX_TICKET_BYTES}", engine="trtllm", reason="size"
        )
    return encoded


def decode_ticket(ticket: bytes) -> Ticket | None:
    """None for bytes that are no ticket of this engine's, whoever sent them."""
    if len(ticket) > MAX_TICKET_BYTES:
        return None
    try:
        return _decoder.decode(ticket)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def generation_params(state: ContextState) -> Any:
    """TensorRT-LLM's words for going on with a prompt. EngineFailed for what a newer one has said to an older one."""
    from tensorrt_llm.llmapi import DisaggregatedParams

    endpoint = state.ctx_info_endpoint
    newer = {
        "disagg_request_id": state.disagg_request_id,
        "ctx_dp_rank": state.ctx_dp_rank,
        "ctx_info_endpoint": list(endpoint) if isinstance(endpoint, tuple) else endpoint,
    }
    try:
        return DisaggregatedParams(
            request_type="generation_only",
            first_gen_tokens=list(state.first_gen_tokens),
            ctx_request_id=state.ctx_request_id,
            opaque_state=state.opaque_state,
            draft_tokens=None if state.draft_tokens is None else list(state.draft_tokens),
            **{name: value for name, value in newer.items() if value is not None},
        )
    except TypeError as error:
        raise EngineFailed(f"a ticket of another TensorRT-LLM: {error}", engine="trtllm") from error


def context_params() -> Any:
    """TensorRT-LLM's words for computing a prompt for others."""
    from tensorrt_llm.llmapi import DisaggregatedParams

    return DisaggregatedParams(request_type="context_only")
