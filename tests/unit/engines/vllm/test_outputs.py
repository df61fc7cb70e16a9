"""What vLLM's core says of a request and of itself, in our words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.engines.vllm.fake_core import (
    EngineCoreOutput,
    LogprobsLists,
    PrefillStats,
    SchedulerStats,
)
from tests.unit.engines.vllm.fake_core import FinishReason as Reason

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.errors import EngineFailed
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.engines.external.answers import Choice, ChoiceOutput
from kvolt.engines.vllm.outputs import choice_output, load_of


def choice(**sampling: Any) -> Choice:
    request = Request(
        request_id=RequestId("r"),
        model="m",
        token_ids=(1, 2, 3),
        stop=StopConditions(max_tokens=9),
        sampling=Sampling(**sampling),
    )
    return Choice(request, 0, "r/1/0")


def output(*tokens: int, **more: Any) -> EngineCoreOutput:
    return EngineCoreOutput("r/1/0", list(tokens), **more)


def test_a_token() -> None:
    assert choice_output(output(5), choice()) == ChoiceOutput((5,))


def test_what_was_cached_comes_with_the_prompt() -> None:
    assert choice_output(output(5, prefill_stats=PrefillStats(3, 1, 2)), choice()).cached_tokens == 2


@pytest.mark.parametrize(
    ("reason", "stop_reason", "finish", "told"),
    [
        (Reason.STOP, None, FinishReason.STOP, None),
        (Reason.STOP, 9, FinishReason.STOP, 9),
        (Reason.LENGTH, None, FinishReason.LENGTH, None),
        (Reason.LENGTH, 9, FinishReason.LENGTH, None),
        (Reason.REPETITION, "repetition_detected", FinishReason.STOP, "repetition_detected"),
    ],
)
def test_ends(reason: Reason, stop_reason: Any, finish: FinishReason, told: Any) -> None:
    result = choice_output(output(5, finish_reason=reason, stop_reason=stop_reason), choice())
    assert (result.finish, result.stop_reason, result.token_ids) == (finish, told, (5,))


@pytest.mark.parametrize("reason", [Reason.ABORT, Reason.ERROR])
def test_what_vllm_gave_up_on_has_failed(reason: Reason) -> None:
    with pytest.raises(EngineFailed) as caught:
        choice_output(output(finish_reason=reason), choice())
    assert caught.value.fields == {"engine": "vllm", "reason": str(reason)}


ROWS = LogprobsLists(
    np.array([[7, 8, 9, 10], [11, 11, 12, 13]]),
    np.array([[-4.0, -0.1, -0.2, -0.3], [-0.5, -0.5, -0.6, -0.7]]),
    np.array([4, 1]),
)


@pytest.mark.parametrize(
    ("wanted", "top"),
    [
        (0, ((), ())),
        (1, (((8, -0.1),), ((11, -0.5),))),
        (2, (((8, -0.1), (9, -0.2)), ((11, -0.5), (12, -0.6)))),
    ],
)
def test_logprobs_as_many_as_asked_for(wanted: int, top: Any) -> None:
    """However many somebody else in the batch has asked for."""
    result = choice_output(output(7, 11, new_logprobs=ROWS), choice(logprobs=wanted))
    assert result.logprobs == (TokenLogprobs(7, -4.0, top[0]), TokenLogprobs(11, -0.5, top[1]))
    [first, _] = result.logprobs
    assert type(first.token_id) is int
    assert type(first.logprob) is float


def test_logprobs_only_if_requested() -> None:
    result = choice_output(output(7, 11, new_logprobs=ROWS, new_prompt_logprobs_tensors=ROWS), choice())
    assert (result.logprobs, result.prompt_logprobs) == (None, None)


def test_an_end_without_tokens_has_no_logprobs_but_is_not_plain() -> None:
    assert choice_output(output(finish_reason=Reason.STOP), choice(logprobs=2)).logprobs == ()


def test_the_first_token_of_a_prompt_has_none() -> None:
    result = choice_output(output(5, new_prompt_logprobs_tensors=ROWS), choice(prompt_logprobs=1))
    assert result.prompt_logprobs == (
        None,
        TokenLogprobs(7, -4.0, ((8, -0.1),)),
        TokenLogprobs(11, -0.5, ((11, -0.5),)),
    )


def test_load() -> None:
    stats = SchedulerStats(3, 2, 4, kv_cache_usage=0.25)
    assert load_of(stats, 200, 1) == WorkerLoad(
        running=3, waiting=6, kv_used_blocks=50, kv_total_blocks=200, dp_rank=1
    )


def test_every_count_of_blocks_comes_back_from_its_share() -> None:
    """vLLM tells a share; a rounding error would leave blocks in an engine at rest."""
    for used in range(200):
        stats = SchedulerStats(kv_cache_usage=1.0 - (199 - used) / 199)
        assert load_of(stats, 199, 0).kv_used_blocks == used


def test_load_of_a_version_without_deferred_requests() -> None:
    stats = SimpleNamespace(num_running_reqs=1, num_waiting_reqs=2, kv_cache_usage=0.0)
    assert load_of(stats, 10, 0).waiting == 2
