"""Request and its parts cross processes unchanged, and stay readable for older and newer peers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvolt.core.ids import InstanceId, RequestId, SequenceHash
from kvolt.core.kv_events import Cleared, KvEvent, KvEventBatch, Removed, Stored, Tier
from kvolt.core.request import (
    Grammar,
    GrammarKind,
    Handoff,
    KvSource,
    MediaSpan,
    Rendezvous,
    Request,
    Role,
    RoutingHints,
    Sampling,
    StopConditions,
    reader_proof,
)
from kvolt.core.trace import TraceRecord

PLAIN = Request(request_id=RequestId("r"), model="m", token_ids=(1, 2), stop=StopConditions(max_tokens=5))
MEDIA = MediaSpan(3, 7, bytes(range(16)), "video")
FULL = Request(
    request_id=RequestId("r"),
    model="m",
    token_ids=tuple(range(100)),
    stop=StopConditions(max_tokens=5, min_tokens=1, stop_token_ids=(2,), ignore_eos=True),
    sampling=Sampling(temperature=0.5, top_k=3, logit_bias={5: -1.0}, seed=7, num_choices=2, logprobs=3),
    block_size=16,
    sequence_hashes=(SequenceHash(2**64 - 1),),
    grammar=Grammar(GrammarKind.REGEX, "a+"),
    salt="s",
    lora="l",
    media=(MEDIA,),
    routing=RoutingHints(tenant="t", pins={Role.PREFILL: InstanceId("i")}, preferred_taints={"gpu": 0.5}),
    kv_sources=(KvSource(InstanceId("i"), Tier.DISK, 4, 1),),
    rendezvous=Rendezvous(2**40, "h:1"),
    handoff=Handoff(ticket=b"\x00\xff", prefill_instance=InstanceId("p"), media=(MEDIA,), first_tokens=(9,)),
    prior_tokens=(5, 6),
    deadline_s=1.5,
    extra={"engine": [1, {"a": None}]},
)


@pytest.mark.parametrize("request_", [PLAIN, FULL])
def test_round_trip(request_: Request) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request_), type=Request) == request_


def test_a_plain_request_carries_no_defaults() -> None:
    assert msgspec.to_builtins(PLAIN) == {
        "request_id": "r",
        "model": "m",
        "token_ids": (1, 2),
        "stop": {"max_tokens": 5},
    }


def test_a_newer_peers_fields_are_ignored() -> None:
    plain: dict[str, Any] = msgspec.to_builtins(PLAIN)
    newer = plain | {"thinking": {"budget": 1}, "stop": {"max_tokens": 5, "later": True}}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=Request) == PLAIN


def test_nothing_is_text() -> None:
    """Tokens, not text, cross process boundaries: no field of a request could hold a prompt."""
    names = set(Request.__struct_fields__) | set(Sampling.__struct_fields__)
    assert not names & {"prompt", "text", "messages", "stop_strings", "content"}


def test_requests_cannot_change() -> None:
    with pytest.raises(AttributeError):
        PLAIN.model = "other"  # type: ignore[misc]


def test_shared_defaults_are_not_shared_state() -> None:
    one = Sampling()
    other = Sampling()
    one.logit_bias[1] = 1.0
    assert other.logit_bias == {}


@pytest.mark.parametrize(
    "change",
    [
        Stored.from_hashes([1, 2**64 - 1], SequenceHash(3), 4, Tier.HOST),
        Stored.from_hashes([]),
        Removed.from_hashes([1, 2], Tier.OBJECT),
        Cleared(),
        Cleared(Tier.PEER),
    ],
)
def test_kv_events_round_trip(change: Stored | Removed | Cleared) -> None:
    batch = KvEventBatch((KvEvent(1, 2**40, change), KvEvent(2, 2**40, change, 3)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KvEventBatch) == batch


def test_a_public_trace_line_loads_as_it_is() -> None:
    line = b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}'
    record = msgspec.json.decode(line, type=TraceRecord)
    assert record == TraceRecord(
        timestamp=27482.0, input_length=6955, output_length=52, hash_ids=(46, 47, 2353)
    )


def test_what_a_request_goes_on_after() -> None:
    assert not PLAIN.has_prior_tokens
    assert (list(PLAIN.open_choices), PLAIN.prior_tokens_of(0), PLAIN.num_context_tokens) == ([0], (), 2)
    one = msgspec.structs.replace(PLAIN, prior_tokens=(7, 8, 9))
    assert one.has_prior_tokens
    assert (list(one.open_choices), one.prior_tokens_of(0)) == ([0], (7, 8, 9))
    assert (one.num_prior_tokens, one.num_context_tokens) == (3, 5)
    several = msgspec.structs.replace(
        PLAIN, sampling=Sampling(num_choices=4), prior_tokens_by_choice=((7, 8), None, (), (9,))
    )
    assert several.has_prior_tokens
    assert list(several.open_choices) == [0, 2, 3]
    assert [several.prior_tokens_of(index) for index in range(4)] == [(7, 8), (), (), (9,)]
    assert (several.num_prior_tokens, several.num_context_tokens) == (3, 5)
    encoded = msgspec.msgpack.encode(several)
    assert msgspec.msgpack.decode(encoded, type=Request) == several
    alike = msgspec.structs.replace(one, sampling=Sampling(num_choices=3))
    assert alike.num_prior_tokens == 9


def test_a_handoff_for_one_reader_has_its_proof_and_not_the_key() -> None:
    handoff = Handoff(ticket=b"t", prefill_instance=InstanceId("p"), reader_key=b"k" * 16)
    first, second = (handoff.for_reader(f"kvolt://worker/d{number}") for number in range(2))
    assert first.reader_proof == reader_proof(b"k" * 16, "kvolt://worker/d0") != second.reader_proof
    assert first.reader_key == second.reader_key == b""
    assert first.for_reader("kvolt://worker/d1") == first, (
        "only a frontend, which has the key, can make another"
    )
