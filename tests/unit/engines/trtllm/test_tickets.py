from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.engines.trtllm import stand_in

from kvolt.core.errors import EngineFailed
from kvolt.core.ids import InstanceId
from kvolt.core.request import Handoff, Request, Sampling, StopConditions
from kvolt.engines.trtllm.prefills import context_states
from kvolt.engines.trtllm.tickets import (
    MAX_STATE_BYTES,
    MAX_TICKET_BYTES,
    ContextState,
    Ticket,
    context_state,
    decode_ticket,
    encode_ticket,
    generation_params,
)

STATE = ContextState(first_gen_tokens=(7,), ctx_request_id=1 << 63, opaque_state=b"\x00\xff")


def params(**changed: object) -> SimpleNamespace:
    found = {"first_gen_tokens": [7], "ctx_request_id": 3, "opaque_state": b"s", "draft_tokens": None}
    return SimpleNamespace(**{**found, **changed})


def test_there_and_back() -> None:
    ticket = Ticket(
        (STATE, replace(STATE, draft_tokens=(1, 2), ctx_info_endpoint=("tcp://a:1", "tcp://b:2")))
    )
    assert decode_ticket(encode_ticket(ticket)) == ticket


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1nobody's",
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",  # a pickle
        encode_ticket(Ticket((STATE,)))[:-1],
        encode_ticket(Ticket((STATE,))) + b"\x00",
        msgspec.msgpack.encode({"choices": [], "version": 2, "engine": "trtllm"}),
        msgspec.msgpack.encode({"choices": [], "version": 1, "engine": "vllm"}),
        msgspec.msgpack.encode({"choices": [], "call": "os.system"}),
        msgspec.msgpack.encode({"choices": [{"first_gen_tokens": [], "ctx_request_id": 1}]}),
        msgspec.msgpack.encode({"choices": [{"first_gen_tokens": [-1], "ctx_request_id": 1}]}),
        msgspec.msgpack.encode({"choices": [{"first_gen_tokens": [1], "ctx_request_id": None}]}),
        msgspec.msgpack.encode({"choices": [{"first_gen_tokens": [1], "ctx_request_id": 1, "strange": 1}]}),
        msgspec.msgpack.encode(
            {
                "choices": [
                    {"first_gen_tokens": [1], "ctx_request_id": 1, "opaque_state": bytes(MAX_STATE_BYTES + 1)}
                ]
            }
        ),
        b"\x00" * (MAX_TICKET_BYTES + 1),
        b"\x81" * 100_000,
    ],
    ids=range(15),
)
def test_bytes_that_are_no_ticket(bad: bytes) -> None:
    assert decode_ticket(bad) is None


def test_a_state_is_what_the_engine_says() -> None:
    assert context_state(params()) == ContextState(first_gen_tokens=(7,), ctx_request_id=3, opaque_state=b"s")
    newer = context_state(params(draft_tokens=[1], ctx_dp_rank=2, ctx_info_endpoint=["tcp://a:1"]))
    assert (newer.draft_tokens, newer.ctx_dp_rank, newer.ctx_info_endpoint) == ((1,), 2, ("tcp://a:1",))


@pytest.mark.parametrize(
    "bad",
    [
        None,
        params(ctx_request_id=None),
        params(first_gen_tokens=[]),
        params(first_gen_tokens=None),
        params(opaque_state=bytes(MAX_STATE_BYTES + 1)),
        params(opaque_state="text"),
    ],
    ids=range(6),
)
def test_no_context_state(bad: object) -> None:
    with pytest.raises(EngineFailed):
        context_state(bad)


def test_a_ticket_has_a_bound() -> None:
    large = replace(STATE, opaque_state=bytes(MAX_STATE_BYTES))
    with pytest.raises(EngineFailed, match="bytes exceeds"):
        encode_ticket(Ticket((large,) * 5))
    assert decode_ticket(msgspec.msgpack.encode(Ticket((large,) * 5))) is None
    assert decode_ticket(msgspec.msgpack.encode(Ticket((large,) * 3))) is not None


def test_in_the_engines_words(model: str) -> None:
    found = generation_params(STATE)
    assert isinstance(found, stand_in.DisaggregatedParams)
    assert (found.request_type, found.first_gen_tokens, found.opaque_state) == (
        "generation_only",
        [7],
        b"\x00\xff",
    )
    with pytest.raises(EngineFailed):  # this version has no such field: it is not left out in silence
        generation_params(replace(STATE, ctx_dp_rank=1))


def _request(handoff: Handoff | None, **changed: object) -> Request:
    request = Request(request_id="r", model="m", token_ids=(1, 2), stop=StopConditions(max_tokens=5))
    return replace(request, handoff=handoff, **changed)


def test_a_ticket_that_does_not_fit_its_request_is_not_used() -> None:
    ticket = encode_ticket(Ticket((STATE,)))
    handoff = Handoff(ticket=ticket, prefill_instance=InstanceId(""), first_tokens=(7,))
    assert context_states(_request(handoff)) == (STATE,)
    assert context_states(_request(None)) == ()
    assert context_states(_request(replace(handoff, first_tokens=(8,)))) == ()
    assert context_states(_request(replace(handoff, first_tokens=None))) == ()
    assert context_states(_request(replace(handoff, ticket=b"?"))) == ()
    assert context_states(_request(handoff, sampling=Sampling(num_choices=2))) == ()
    assert context_states(_request(handoff, prior_tokens=(7, 8))) == ()
