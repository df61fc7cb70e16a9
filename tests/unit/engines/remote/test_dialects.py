"""What real servers said, in our words; and what they are asked."""

from __future__ import annotations

from typing import Any

import httptools
import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.engines.remote.fake_server import recorded
from tests.unit.engines.remote.lab import SAID, greedy
from tests.unit.engines.sampling_lab import ignored_fields

from kvolt.core.delta import FinishReason
from kvolt.core.errors import EngineDied, InvalidRequest, KvoltError, ProtocolError, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Request, Sampling
from kvolt.engines.external.answers import ChoiceOutput
from kvolt.engines.remote.dialect import Dialect, check_supported
from kvolt.engines.remote.exchange import merge_outputs
from kvolt.engines.remote.refusals import refusal
from kvolt.engines.remote.sglang_dialect import SglangDialect
from kvolt.engines.remote.vllm_dialect import VllmDialect
from kvolt.runtime.http.sse import DONE, EventReader

KINDS = ["vllm", "sglang"]
EOS = 2


def dialect_of(kind: str) -> Dialect:
    return VllmDialect("http://s", "tiny") if kind == "vllm" else SglangDialect("http://s", (EOS,))


class _Body:
    def __init__(self, data: bytes) -> None:
        self.pieces: list[bytes] = []
        self.parser = httptools.HttpResponseParser(self)
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)


def read(kind: str, body: bytes, request: Request | None = None, piece_bytes: int = 1 << 20) -> ChoiceOutput:
    """All that an answer says."""
    reader, events = dialect_of(kind).reader(request or greedy(), 0), EventReader()
    said: ChoiceOutput | None = None
    for at in range(0, len(body), piece_bytes):
        for event in events.feed(body[at : at + piece_bytes]):
            output = reader.end() if event == DONE else reader.read(event)
            if output is not None:
                said = output if said is None else merge_outputs(said, output)
    assert said is not None
    return said


def body_of(kind: str, name: str) -> bytes:
    return b"".join(_Body(recorded(kind, name)).pieces)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1 << 20])
def test_a_recorded_answer_in_pieces_of_any_size(kind: str, piece_bytes: int) -> None:
    output = read(kind, body_of(kind, "greedy"), piece_bytes=piece_bytes)
    assert list(output.token_ids) == SAID
    assert (output.finish, output.stop_reason) == (FinishReason.LENGTH, None)
    assert output.cached_tokens == {"vllm": 96, "sglang": 0}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_a_stop_token_ended(kind: str) -> None:
    request = greedy(stop_token_ids=(SAID[2],), ignore_eos=False)
    output = read(kind, body_of(kind, "stopped"), request)
    assert (list(output.token_ids), output.finish, output.stop_reason) == (
        SAID[:3],
        FinishReason.STOP,
        SAID[2],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_answer_continues_after_a_loss(kind: str) -> None:
    assert list(read(kind, body_of(kind, "resumed")).token_ids) == SAID[2:]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs(kind: str) -> None:
    request = replace(greedy(), sampling=Sampling(temperature=0.0, logprobs=2))
    output = read(kind, body_of(kind, "logprobs"), request)
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == SAID
    for entry in output.logprobs:
        assert entry.top[0] == (entry.token_id, entry.logprob)  # greedy: the likeliest was taken
        assert entry.top[0][1] >= entry.top[1][1]


def test_a_dead_engine_in_the_place_of_an_answer() -> None:
    with pytest.raises(EngineDied, match="EngineCore encountered an issue"):
        read("vllm", body_of("vllm", "died"))


def test_a_prompt_that_is_too_long_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest, match="longer than the model's context"):
        read("sglang", body_of("sglang", "too-long"))
    error = refusal("http://s", 400, body_of("vllm", "too-long"))
    assert isinstance(error, InvalidRequest)
    assert "maximum context length is 2048" in error.message


def test_sglang_with_chunks_of_new_tokens_only() -> None:
    """As with --incremental-streaming-output."""
    chunks = []
    for number, token in enumerate(SAID, 1):
        finish = {"type": "length", "length": 6} if number == len(SAID) else None
        chunks.append(
            {"output_ids": [token], "meta_info": {"completion_tokens": number, "finish_reason": finish}}
        )
    body = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)
    assert list(read("sglang", body).token_ids) == SAID


def sglang_news(
    tokens: list[int], finish: dict[str, Any] | None, **stop: Any
) -> tuple[ChoiceOutput | None, bool]:
    reader = dialect_of("sglang").reader(greedy(**stop), 0)
    chunk = {"output_ids": tokens, "meta_info": {"completion_tokens": len(tokens), "finish_reason": finish}}
    return reader.read(msgspec.json.encode(chunk)), reader.was_cut


def test_sglang_does_not_look_at_stop_tokens_with_ignore_eos() -> None:
    output, was_cut = sglang_news([5, 6, 7, 8], None, stop_token_ids=(7,))
    assert output is not None
    assert (output.token_ids, output.finish, output.stop_reason) == ((5, 6, 7), FinishReason.STOP, 7)
    assert was_cut
    output, was_cut = sglang_news([5, 6, 7, 8], None, stop_token_ids=(7,), min_tokens=3)
    assert output is not None
    assert (output.token_ids, output.finish, was_cut) == ((5, 6, 7, 8), None, False)


def test_sglang_calls_an_end_at_full_length_a_length() -> None:
    output, was_cut = sglang_news([5, EOS], {"type": "length", "length": 2}, ignore_eos=False, max_tokens=2)
    assert output is not None
    assert (output.finish, was_cut) == (FinishReason.STOP, False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("event", [b"nonsense", b'{"choices": 3, "output_ids": 3}', b"\xff\xfe", b"{"])
def test_what_is_no_chunk(kind: str, event: bytes) -> None:
    with pytest.raises(ProtocolError):
        dialect_of(kind).reader(greedy(), 0).read(event)


@pytest.mark.parametrize("finish", ["abort", "error", "gone"])
def test_an_answer_that_the_server_gave_up(finish: str) -> None:
    chunk = {"choices": [{"token_ids": [], "finish_reason": finish}]}
    with pytest.raises(EngineDied):
        dialect_of("vllm").reader(greedy(), 0).read(msgspec.json.encode(chunk))


def test_old_server_without_token_ids() -> None:
    chunk = {"choices": [{"text": " lit", "finish_reason": None}]}
    with pytest.raises(ProtocolError, match="token ids"):
        dialect_of("vllm").reader(greedy(), 0).read(msgspec.json.encode(chunk))


# --- what they are asked


def asked(kind: str, request: Request, index: int = 0) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(dialect_of(kind).body(request, index))
    return {**body, **body.pop("sampling_params", {})}


@pytest.mark.parametrize("kind", KINDS)
def test_every_declared_sampling_field_reaches_the_server(kind: str) -> None:
    dialect = dialect_of(kind)

    def mapped(sampling: Sampling) -> list[bytes]:
        request = replace(greedy(), sampling=sampling)
        check_supported(request)
        return [dialect.body(request, index) for index in request.open_choices]

    assert ignored_fields(dialect.sampling_fields, mapped) == set()


def test_every_field_has_its_word() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={5: -1.0},
        seed=40,
        num_choices=3,
    )
    request = replace(greedy(min_tokens=2, stop_token_ids=(9,)), sampling=sampling, salt="tenant")
    both = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -1.0},
        "stop_token_ids": [9],
        "ignore_eos": True,
        "stream": True,
    }
    of_vllm, of_sglang = asked("vllm", request, 2), asked("sglang", request, 2)
    assert both.items() <= of_vllm.items()
    assert both.items() <= of_sglang.items()
    assert (of_vllm["seed"], of_sglang["sampling_seed"]) == (42, 42)  # the third choice's own
    assert (of_vllm["max_tokens"], of_vllm["min_tokens"]) == (6, 2)
    assert (of_sglang["max_new_tokens"], of_sglang["min_new_tokens"]) == (6, 2)
    assert of_vllm["cache_salt"] == "kvolt-salt:tenant"  # as the translator of its KV events knows it
    assert of_sglang["cache_salt"] == "tenant"


def test_what_is_not_said_is_all_tokens() -> None:
    assert asked("vllm", greedy())["top_k"] == 0
    assert asked("sglang", greedy())["top_k"] == -1


def test_who_resumes_asks_for_the_rest() -> None:
    request = replace(greedy(min_tokens=5), prior_tokens=(442, 613))
    assert asked("vllm", request)["prompt"] == [*range(10, 110), 442, 613]
    assert (asked("vllm", request)["max_tokens"], asked("vllm", request)["min_tokens"]) == (4, 3)
    assert asked("sglang", request)["input_ids"] == [*range(10, 110), 442, 613]


@pytest.mark.parametrize(
    ("grammar", "of_vllm", "of_sglang"),
    [
        (Grammar(GrammarKind.REGEX, "a+"), {"regex": "a+"}, ("regex", "a+")),
        (Grammar(GrammarKind.CHOICE, '["a.b", "c"]'), {"choice": ["a.b", "c"]}, ("regex", r"(a\.b|c)")),
        (
            Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
            {"json": {"type": "object"}},
            ("json_schema", '{"type": "object"}'),
        ),
        (
            Grammar(GrammarKind.JSON_OBJECT, ""),
            {"json_object": True},
            ("json_schema", '{"type": "object"}'),
        ),
        (Grammar(GrammarKind.EBNF, "root ::= x"), {"grammar": "root ::= x"}, ("ebnf", "root ::= x")),
        (
            Grammar(GrammarKind.STRUCTURAL_TAG, "{}"),
            {"structural_tag": "{}"},
            ("structural_tag", "{}"),
        ),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Grammar) else "",
)
def test_grammars(grammar: Grammar, of_vllm: dict[str, Any], of_sglang: tuple[str, str]) -> None:
    request = replace(greedy(), grammar=grammar)
    assert asked("vllm", request)["structured_outputs"] == of_vllm
    assert asked("sglang", request)[of_sglang[0]] == of_sglang[1]


def test_what_cannot_be_right_is_refused_by_name() -> None:
    resumed = replace(greedy(), prior_tokens=(442,))
    check_supported(resumed)
    for request, feature in (
        (replace(resumed, grammar=Grammar(GrammarKind.REGEX, "a")), "resume with a grammar"),
        (replace(resumed, sampling=Sampling(presence_penalty=0.1)), "resume with penalties"),
        (replace(resumed, sampling=Sampling(frequency_penalty=0.1)), "resume with penalties"),
        (replace(greedy(), sampling=Sampling(prompt_logprobs=1)), "prompt_logprobs"),
        (replace(greedy(), lora="a"), "lora"),
        (replace(greedy(), prefill_only=True), "handoff"),
        (replace(greedy(), extra={"logits_processors": []}), "logits_processors"),
    ):
        with pytest.raises(Unsupported) as caught:
            check_supported(request)
        assert caught.value.fields["feature"] == feature
    assert "allowed_token_ids" not in dialect_of("sglang").sampling_fields


@pytest.mark.parametrize(
    ("status", "code", "is_retryable"),
    [
        (400, "invalid_request", False),
        (401, "unavailable", True),
        (404, "unavailable", True),
        (429, "overloaded", True),
        (500, "engine_died", True),
        (502, "engine_died", True),
        (503, "overloaded", True),
    ],
)
def test_what_a_status_means(status: int, code: str, is_retryable: bool) -> None:
    error: KvoltError = refusal("http://s", status, b"<html>no</html>")
    assert (error.code, error.retryable) == (code, is_retryable)
