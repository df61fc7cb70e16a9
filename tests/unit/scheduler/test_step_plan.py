"""Limits, and requests that do not fit them; batches that stay the same."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.scheduler_lab import limits, request

from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.scheduler.step_plan import PlainBatch, check_request

BOUNDS = limits(context_length=20, block_size=4)


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("a", ()), "token_ids"),
        (request("a", n=0), "n"),
        (request("a", max_tokens=0), "max_tokens"),
        (request("a", max_tokens=4, min_tokens=5), "min_tokens"),
        (request("a", max_tokens=4, min_tokens=-1), "min_tokens"),
        (request("a", max_tokens=2, prior_tokens=(1, 2)), "prior_tokens"),
        (request("a", (1,) * 10, max_tokens=11), "max_tokens"),
        (request("a", (1,) * 10, max_tokens=8), "max_tokens"),
    ],
    ids=["prompt", "n", "nothing", "min over max", "min", "resume", "context", "blocks"],
)
def test_what_can_never_end_here_is_refused(bad: Request, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(bad, BOUNDS, num_blocks=4)
    assert caught.value.fields["param"] == param


def test_what_just_fits_is_taken() -> None:
    check_request(request("a", (1,) * 10, max_tokens=7, min_tokens=7), BOUNDS, num_blocks=4)
    check_request(request("a", (1,) * 10, max_tokens=10), BOUNDS, num_blocks=5)


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_batch_tokens", "max_waiting", "context_length", "block_size"]
)
def test_limits_are_one_or_more(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        limits(**{name: 0})
    assert caught.value.fields["key"] == name


def test_a_step_has_room_for_a_token_of_each_sequence() -> None:
    limits(max_num_seqs=8, max_batch_tokens=8)
    with pytest.raises(ConfigError) as caught:
        limits(max_num_seqs=9, max_batch_tokens=8)
    assert caught.value.fields["key"] == "max_batch_tokens"


def test_a_batch_is_drained_once_and_equal_ids_are_one_object() -> None:
    batch = PlainBatch()
    told = []
    for names in ("ab", "ab", "ba", ""):
        batch.ids += [RequestId(name) for name in names]
        batch.tokens += [len(told), 7][: len(names)]
        told.append(batch.drain())
    assert told == [(("a", "b"), (0, 7)), (("a", "b"), (1, 7)), (("b", "a"), (2, 7)), ((), ())]
    assert told[0][0] is told[1][0]
