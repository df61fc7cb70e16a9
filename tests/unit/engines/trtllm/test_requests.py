from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.sampling_lab import ignored_fields

from kvolt.core.delta import FinishReason
from kvolt.core.errors import EngineFailed, InvalidRequest, Unsupported
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Grammar, GrammarKind, Handoff, MediaSpan, Request, Sampling, StopConditions
from kvolt.engines.external.answers import Answers, Choice
from kvolt.engines.trtllm.arguments import Seeds
from kvolt.engines.trtllm.engine import TrtllmEngine
from kvolt.engines.trtllm.outputs import Reader, stats_of
from kvolt.engines.trtllm.requests import check_resumable, check_supported, sampling_params

EOS = (2, 3)
REQUEST = Request(request_id=RequestId("r"), model="m", token_ids=(5, 6), stop=StopConditions(max_tokens=10))
HANDOFF = Handoff(ticket=b"", prefill_instance=InstanceId(""), first_tokens=(9,))


def checked(request: Request, *, has_grammars: bool = True, seeds: Seeds = Seeds.KEPT) -> None:
    check_supported(request, has_grammars=has_grammars, seeds=seeds)
    check_resumable(request, seeds)


def params(request: Request, index: int = 0, num_tokens: int = 0) -> Any:
    choice = Choice(request, index, f"r/1/{index}", num_tokens=num_tokens)
    return sampling_params(choice, EOS, max_tokens=request.stop.max_tokens - num_tokens)


SEEDED = replace(REQUEST, sampling=Sampling(seed=1))
GUIDED = replace(REQUEST, grammar=Grammar(GrammarKind.JSON_OBJECT, ""))


@pytest.mark.parametrize(
    ("request_", "feature"),
    [
        (replace(REQUEST, media=(MediaSpan(0, 1, bytes(16)),)), "media"),
        (replace(REQUEST, extra={"logits_processors": ["a"]}), "logits_processors"),
        (replace(GUIDED, prior_tokens=(1,)), "resume with a grammar"),
        (replace(SEEDED, prior_tokens=(1,)), "resume with a seed"),
        (replace(SEEDED, handoff=HANDOFF), "resume with a seed"),
        (replace(REQUEST, prior_tokens=(1,), sampling=Sampling(presence_penalty=1)), "resume with penalties"),
        (
            replace(REQUEST, prior_tokens=(1,), sampling=Sampling(frequency_penalty=1)),
            "resume with penalties",
        ),
        (
            replace(REQUEST, prior_tokens=(1,), sampling=Sampling(repetition_penalty=2)),
            "resume with penalties",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_name(request_: Request, feature: str) -> None:
    with pytest.raises(Unsupported) as refused:
        checked(request_)
    assert refused.value.fields["feature"] == feature


def test_seeds_without_sampler_support() -> None:
    checked(replace(SEEDED, sampling=Sampling(seed=1, temperature=0)), seeds=Seeds.NONE)
    checked(REQUEST, seeds=Seeds.NONE)
    with pytest.raises(Unsupported, match="seed"):
        checked(SEEDED, seeds=Seeds.NONE)


def test_grammars_need_a_backend() -> None:
    checked(GUIDED)
    with pytest.raises(Unsupported, match="guided_decoding_backend"):
        checked(GUIDED, has_grammars=False)


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        SEEDED,
        replace(REQUEST, prior_tokens=(1,)),
        replace(SEEDED, prior_tokens=(1,), sampling=Sampling(seed=1, temperature=0)),
        replace(REQUEST, sampling=Sampling(presence_penalty=1)),
    ],
)
def test_not_refused(request_: Request) -> None:
    checked(request_)
    checked(replace(SEEDED, prior_tokens=(1,)), seeds=Seeds.BY_POSITION)


def test_every_declared_sampling_field_reaches_tensorrt_llm(model: str) -> None:
    def mapped(sampling: Sampling) -> list[Any]:
        request = replace(REQUEST, sampling=sampling)
        checked(request)
        return [sampling_params(choice, EOS, max_tokens=10) for choice in Answers().open(request)]

    assert ignored_fields(TrtllmEngine.sampling_fields, mapped) == set()


def test_sampling_in_its_words(model: str) -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=2,
        repetition_penalty=3,
        seed=40,
        logprobs=0,
    )
    found = params(replace(REQUEST, sampling=sampling), index=2)
    assert (found.temperature, found.top_p, found.top_k, found.min_p, found.seed) == (0.5, 0.9, 5, 0.1, 42)
    assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (1, 2, 3)
    assert (found.n, found.max_tokens, found.logprobs, found.detokenize) == (1, 10, 1, False)
    assert (found.end_id, found.stop_token_ids, found.include_stop_str_in_output) == (2, [3], True)


def test_plain_sampling_is_not_greedy_there(model: str) -> None:
    assert not params(REQUEST)._greedy_decoding
    greedy = params(replace(REQUEST, sampling=Sampling(temperature=0, seed=1)))
    assert greedy._greedy_decoding
    assert (greedy.temperature, greedy.seed) == (None, None)


def test_choices_without_a_seed_draw_apart(model: str) -> None:
    assert len({params(REQUEST, index).seed for index in range(4)}) == 4


def test_ends(model: str) -> None:
    stops = replace(REQUEST, stop=StopConditions(max_tokens=10, stop_token_ids=(3, 8)))
    assert params(stops).stop_token_ids == [3, 8]
    ignoring = params(replace(stops, stop=replace(stops.stop, ignore_eos=True)))
    assert (ignoring.stop_token_ids, ignoring.ignore_eos) == ([3, 8], True)
    late = params(replace(stops, stop=replace(stops.stop, min_tokens=4)))
    assert (late.stop_token_ids, late.ignore_eos) == (None, True), "it would stop too early"
    past = params(replace(stops, stop=replace(stops.stop, min_tokens=4)), num_tokens=4)
    assert (past.stop_token_ids, past.ignore_eos, past.max_tokens) == ([3, 8], False, 6)


@pytest.mark.parametrize(
    ("grammar", "field", "value"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, "{}"), "json", "{}"),
        (Grammar(GrammarKind.JSON_OBJECT, ""), "json_object", True),
        (Grammar(GrammarKind.REGEX, "a+"), "regex", "a+"),
        (Grammar(GrammarKind.EBNF, "root ::= x"), "grammar", "root ::= x"),
        (Grammar(GrammarKind.CHOICE, '["yes", "\\"no\\""]'), "grammar", 'root ::= "yes" | "\\"no\\""'),
        (Grammar(GrammarKind.STRUCTURAL_TAG, "{}"), "structural_tag", "{}"),
    ],
    ids=lambda value: str(getattr(value, "kind", "")),
)
def test_grammars_in_its_words(model: str, grammar: Grammar, field: str, value: object) -> None:
    found = params(replace(REQUEST, grammar=grammar)).guided_decoding
    assert getattr(found, field) == value


def test_what_it_refuses_is_the_callers_fault(model: str) -> None:
    with pytest.raises(InvalidRequest, match="top_p"):
        params(replace(REQUEST, sampling=Sampling(top_p=2.0)))


# --- outputs


class _Told:
    def __init__(self, tokens: list[int], finish: str | None = None, logprobs: Any = ()) -> None:
        self.outputs = [self]
        self.token_ids = tokens
        self.finish_reason = finish
        self.logprobs = logprobs
        self.cached_tokens = 1


def reader(request: Request = REQUEST, first: tuple[int, ...] = (), num_tokens: int = 0) -> Reader:
    return Reader(Choice(request, 0, "r/1/0", num_tokens=num_tokens), EOS, first)


def test_what_is_new() -> None:
    one = reader()
    assert one.read(_Told([])) is None
    output = one.read(_Told([7, 8]))
    assert output is not None
    assert (output.token_ids, output.finish, output.cached_tokens) == ((7, 8), None, 1)
    assert one.read(_Told([7, 8])) is None
    output = one.read(_Told([7, 8, 9], "length"))
    assert output is not None
    assert (output.token_ids, output.finish) == ((9,), FinishReason.LENGTH)


def test_an_answer_ends_by_our_rules() -> None:
    stop = StopConditions(max_tokens=5, min_tokens=2, stop_token_ids=(8,))
    request = replace(REQUEST, stop=stop)
    output = reader(request).read(_Told([8, 2, 8, 9, 9]))
    assert output is not None
    assert (output.token_ids, output.finish, output.stop_reason) == ((8, 2, 8), FinishReason.STOP, 8)
    output = reader(request).read(_Told([9, 9, 2]))
    assert output is not None
    assert (output.token_ids, output.finish, output.stop_reason) == ((9, 9, 2), FinishReason.STOP, None)
    output = reader(request).read(_Told([9, 9, 9, 9, 9, 9]))
    assert output is not None
    assert (len(output.token_ids), output.finish) == (5, FinishReason.LENGTH)


@pytest.mark.parametrize("reason", ["timeout", "cancelled", "something new"])
def test_it_gave_up(reason: str) -> None:
    with pytest.raises(EngineFailed, match=reason):
        reader().read(_Told([7], reason))


def test_after_a_prompt_from_elsewhere() -> None:
    one = reader(first=(9,), num_tokens=1)
    assert one.read(_Told([9])) is None
    output = one.read(_Told([9, 9]))
    assert output is not None
    assert (output.token_ids, output.cached_tokens) == ((9,), 2)
    with pytest.raises(EngineFailed, match="does not continue"):
        reader(first=(9,)).read(_Told([8]))


class _Logprob:
    def __init__(self, logprob: float) -> None:
        self.logprob = logprob


def test_logprobs() -> None:
    request = replace(REQUEST, sampling=Sampling(logprobs=2))
    told = {7: _Logprob(-3.0), 1: _Logprob(-0.1), 4: _Logprob(-0.2)}
    output = reader(request).read(_Told([7], logprobs=[told]))
    assert output is not None
    (row,) = output.logprobs or ()
    assert (row.token_id, row.logprob, row.top) == (7, -3.0, ((1, -0.1), (4, -0.2)))
    for bad in ([], [{1: _Logprob(0)}], [-1.0]):
        with pytest.raises(EngineFailed, match="logprob"):
            reader(request).read(_Told([7], logprobs=bad))
    alone = replace(REQUEST, sampling=Sampling(logprobs=0))
    output = reader(alone).read(_Told([7], logprobs=[-1.0]))
    assert output is not None
    assert output.logprobs is not None
    assert output.logprobs[0].logprob == -1.0


def test_figures() -> None:
    found = stats_of({"iter": 1, "kvCacheStats": {"maxNumBlocks": 7, "usedNumBlocks": 2, "freeNumBlocks": 5}})
    assert found is not None
    assert found.kv_cache_stats is not None
    assert (found.kv_cache_stats.max_num_blocks, found.kv_cache_stats.used_num_blocks) == (7, 2)
    assert stats_of({"kvCacheStats": "?"}) is None
    assert stats_of([]) is None
