"""Messages, and the in_flight that reads steps."""

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec.structs import replace

from kvolt.core.delta import Delta, FinishReason, StepOutput, Usage
from kvolt.core.errors import ErrorInfo, InvalidRequest
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Cleared
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request, Sampling, StopConditions
from kvolt.engines.contract import KvAllocation
from kvolt.engines.framing import FrameSplitter, encode_frame, encode_raw
from kvolt.engines.native.shell.in_flight import InFlight
from kvolt.engines.native.shell.messages import (
    METHODS,
    Step,
    StepEncoder,
    decode_answer,
)
from kvolt.scheduler.step_plan import check_vocabulary

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def request(request_id: RequestId = A, choices: int = 1) -> Request:
    return Request(
        request_id=request_id,
        model="m",
        token_ids=(1, 2, 3),
        stop=StopConditions(max_tokens=4),
        sampling=Sampling(num_choices=choices),
    )


END = Delta((9,), finish=FinishReason.LENGTH, usage=Usage(3, 4))


def test_no_torch_is_needed_to_read_them() -> None:
    program = "import kvolt.engines.native.shell.engine, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_every_call_can_be_decoded() -> None:
    arguments = {
        "withdraw": (A,),
        "match": (request(),),
        "held_kv": (A,),
        "computed_kv": (A, 3),
        "allocate_kv": ([b"k" * 16], [7]),
        "commit_kv": (KvAllocation(1, (4, 5)), 2, "r"),
        "attach_kv": (KvAllocation(1, (4, 5)), 2, "r"),
        "pin_sealed": (A,),
        "prefill": (request(),),
        "release_prefill": (A,),
        "load_lora": ("name", "path"),
        "unload_lora": ("name",),
        "embed": ([[1, 2]], "last"),
    }
    for name, method in METHODS.items():
        given_arguments = arguments.get(name, ())
        assert method.decode_arguments(encode_raw(given_arguments)) == given_arguments


# --- steps


def told(wording: StepEncoder, output: StepOutput, num_seen: int = 0) -> Step:
    """As it arrives."""
    (message,) = FrameSplitter().feed(bytes(encode_frame(wording.step(num_seen, output))))
    step = decode_answer(message)
    assert isinstance(step, Step)
    return step


def in_flight_with(*requests: Request) -> InFlight:
    in_flight = InFlight()
    for number, each in enumerate(requests, 1):
        in_flight.add(each, number)
    return in_flight


def test_a_step_survives_encoding() -> None:
    output = StepOutput(
        deltas=((A, Delta((5,), cached_tokens=3)),),
        failed=((B, ErrorInfo("engine_failed", "why", {"engine": "native"})),),
        load=WorkerLoad(running=2),
        plain_ids=(C,),
        plain_tokens=(7,),
        kv_changes=(Cleared(),),
    )
    in_flight = in_flight_with(request(A), request(B), request(C))
    assert in_flight.filter_step(told(StepEncoder(), output, 3)) == output
    assert in_flight.find(B) is None
    assert in_flight.num_sequences == 2


def test_the_same_batch_is_sent_once_and_is_the_same_object() -> None:
    wording, in_flight = StepEncoder(), in_flight_with(request(A), request(B))
    first = StepOutput(plain_ids=(A, B), plain_tokens=(1, 2))
    nothing = StepOutput(load=WorkerLoad())
    steps = [told(wording, output, 2) for output in (first, first, nothing, first)]
    assert [step.plain_ids for step in steps] == [(A, B), None, (), (A, B)]
    outputs = [in_flight.filter_step(step) for step in steps]
    assert [output and output.plain_ids for output in outputs] == [(A, B), (A, B), (), (A, B)]
    assert outputs[0] is not None
    assert outputs[0].plain_ids is outputs[1].plain_ids  # type: ignore[union-attr]
    # The same ids after a pause may be other requests of that name: who goes by the object must look again.
    assert outputs[3].plain_ids is not outputs[0].plain_ids  # type: ignore[union-attr]
    smaller = told(wording, StepOutput(plain_ids=(B,), plain_tokens=(1,)), 2)
    assert smaller.plain_ids == (B,)


def test_no_output_of_dropped_requests() -> None:
    """Until the engine has heard of it; others are told as ever."""
    wording, in_flight = StepEncoder(), in_flight_with(request(A), request(B), request(C))
    in_flight.drop(A, 4)
    in_flight.drop(C, 5)
    late = StepOutput(
        deltas=((C, END),),
        failed=((C, ErrorInfo("engine_failed", "late")),),
        plain_ids=(A, B),
        plain_tokens=(1, 2),
        load=WorkerLoad(running=3),
    )
    output = in_flight.filter_step(told(wording, late, 3))
    assert output == StepOutput(plain_ids=(B,), plain_tokens=(2,), load=WorkerLoad(running=3))
    assert in_flight.filter_step(told(wording, StepOutput(plain_ids=(A,), plain_tokens=(1,)), 4)) is None
    assert in_flight.num_sequences == 1


def test_an_id_in_use_again_hears_nothing_of_its_past() -> None:
    wording, in_flight = StepEncoder(), in_flight_with(request(A))
    in_flight.drop(A, 2)
    in_flight.add(request(A), 3)
    past = StepOutput(deltas=((A, END),))
    assert in_flight.filter_step(told(wording, past, 1)) is None
    assert in_flight.find(A) is not None
    assert in_flight.filter_step(told(wording, past, 3)) == past
    assert in_flight.find(A) is None


def test_a_request_ends_with_the_last_of_its_choices() -> None:
    wording, in_flight = StepEncoder(), in_flight_with(request(A, choices=2))
    assert in_flight.num_sequences == 2
    in_flight.filter_step(told(wording, StepOutput(deltas=((A, END),)), 1))
    assert in_flight.find(A) is not None
    assert in_flight.num_sequences == 1
    in_flight.filter_step(told(wording, StepOutput(deltas=((A, replace(END, index=1)),)), 1))
    assert (in_flight.find(A), in_flight.num_sequences) == (None, 0)


def test_a_dropped_request_counts_no_longer() -> None:
    wording, in_flight = StepEncoder(), in_flight_with(request(A, choices=3))
    in_flight.filter_step(told(wording, StepOutput(deltas=((A, END),)), 1))
    in_flight.drop(A, 2)
    in_flight.drop(A, 3)
    assert in_flight.num_sequences == 0


# --- tokens


@pytest.mark.parametrize(
    ("param", "changed"),
    [
        ("token_ids", replace(request(), token_ids=(1, 50))),
        ("token_ids", replace(request(), token_ids=(-1, 2))),
        ("prior_tokens", replace(request(), prior_tokens=(50,))),
        ("stop_token_ids", replace(request(), stop=StopConditions(max_tokens=1, stop_token_ids=(77,)))),
        ("allowed_token_ids", replace(request(), sampling=Sampling(allowed_token_ids=(3, 99)))),
        ("logit_bias", replace(request(), sampling=Sampling(logit_bias={-5: 1.0}))),
        (
            "handoff",
            replace(request(), handoff=Handoff(ticket=b"", prefill_instance="", first_tokens=(51,))),  # type: ignore[arg-type]
        ),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(param: str, changed: Request) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_vocabulary(changed, 50)
    assert caught.value.fields["param"] == param


def test_all_tokens_of_the_model_are_taken() -> None:
    check_vocabulary(replace(request(), token_ids=(0, 49), prior_tokens=(0,)), 50)
