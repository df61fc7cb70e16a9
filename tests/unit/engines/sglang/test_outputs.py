"""What SGLang has said, recorded, in our words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from tests.unit.engines.sglang.lab import LENGTH, RECORDED, recorded_batches, request, row

from kvolt.core.delta import FinishReason
from kvolt.core.errors import EngineFailed, InvalidRequest, Overloaded
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.engines.external.answers import Answers, Choice
from kvolt.engines.sglang.host.host import rows_of
from kvolt.engines.sglang.host.scheduler import mark_of, read_mark
from kvolt.engines.sglang.outputs import choice_output, failure_of


def choice_of(asked: Request) -> Choice:
    return Answers().open(asked)[0]


def test_the_host_reads_what_schedulers_send() -> None:
    """The recorded fields of SGLang's BatchTokenIDOutput give the rows that were recorded after them."""
    told = [batch for name in ("logprobs", "again", "salted", "bad") for batch in recorded_batches(name)]
    for fields, batch in zip(RECORDED["batches"], told, strict=True):
        rows = rows_of(SimpleNamespace(**fields))
        assert [each.token_ids for each in rows] == [each.token_ids for each in batch.rows]
        assert [each.finish for each in rows] == [each.finish for each in batch.rows]
        assert [list(map(list, each.logprobs or ())) for each in rows] == [
            list(map(list, each.logprobs or ())) for each in batch.rows
        ]


def test_logprobs() -> None:
    asked = request(sampling=Sampling(temperature=0.0, logprobs=1, prompt_logprobs=2))
    choice = choice_of(asked)
    first = choice_output(recorded_batches("logprobs")[0].rows[0], choice)
    assert first.token_ids == (842,)
    assert first.logprobs is not None
    assert first.logprobs[0].token_id == 842
    assert first.logprobs[0].top == ((842, first.logprobs[0].logprob),), "as many as were asked for"
    told = first.prompt_logprobs
    assert told is not None
    assert len(told) == len(asked.token_ids)
    assert told[0] is None
    assert [each.token_id for each in told[1:] if each] == list(asked.token_ids[1:])
    assert all(len(each.top) == 2 for each in told[1:] if each)
    assert first.cached_tokens == 0


def test_cached_tokens_come_first_and_once() -> None:
    choice = choice_of(request())
    batches = recorded_batches("again")
    first = choice_output(batches[0].rows[0], choice)
    assert first.cached_tokens == 32
    choice.has_started = True
    last = choice_output(batches[-1].rows[0], choice)
    assert (last.cached_tokens, last.finish) == (None, FinishReason.LENGTH)


def test_a_salt_finds_nothing_of_others() -> None:
    assert choice_output(recorded_batches("salted")[0].rows[0], choice_of(request())).cached_tokens == 0


@pytest.mark.parametrize("name", ["bad", "wrong"])
def test_what_sglang_refuses_is_the_caller_s_fault(name: str) -> None:
    with pytest.raises(InvalidRequest, match="SGLang aborted"):
        choice_output(recorded_batches(name)[-1].rows[0], choice_of(request()))


def test_failures() -> None:
    assert isinstance(failure_of({"type": "abort", "status_code": 503}), Overloaded)
    assert isinstance(failure_of({"type": "abort", "message": "transfer failed"}), EngineFailed)


def test_a_stop_token_is_the_reason_and_a_grammar_s_last_is_none() -> None:
    stop = StopConditions(max_tokens=9, stop_token_ids=(7,))
    finish = {"type": "stop", "matched": 7}
    assert choice_output(row("r", 7, finish=finish), choice_of(request(stop=stop))).stop_reason == 7
    ended = choice_output(row("r", 8, finish={"type": "stop", "matched": 8}), choice_of(request(stop=stop)))
    assert (ended.finish, ended.stop_reason) == (FinishReason.STOP, None)


def test_stop_tokens_where_sglang_ignores_them() -> None:
    stop = StopConditions(max_tokens=9, min_tokens=1, stop_token_ids=(7,), ignore_eos=True)
    asked = request(stop=stop)
    passed = choice_output(row("r", 7), choice_of(asked))
    assert passed.finish is None, "min_tokens"
    choice = choice_of(replace(asked, prior_tokens=(5,)))
    ended = choice_output(row("r", 6, 7, 8), choice)
    assert (ended.token_ids, ended.finish, ended.stop_reason) == ((6, 7), FinishReason.STOP, 7)
    both = choice_output(row("r", 7, finish=LENGTH), choice)
    assert (both.finish, both.stop_reason) == (FinishReason.STOP, 7)


def test_marks() -> None:
    assert read_mark(mark_of(3, 12345)) == (3, 12345)
