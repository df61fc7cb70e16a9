"""kvolt in front of real SGLang workers, as a user starts it: routing by what they hold, and one that is killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept import SMALL
from tests.served import (
    Served,
    cached_of,
    check_a_returning_prefix_goes_to_its_holder,
    check_streams_of_a_killed_worker_go_on,
    worker_of,
)

ENGINE_ARGS = SMALL | {"max_total_tokens": 8192}
PAGE = SMALL["page_size"]


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("pair"), tiny, "sglang", ENGINE_ARGS, "--workers", "2")
    try:
        served.ready(2)
        yield served
    finally:
        served.close()


def test_a_returning_prefix_goes_to_its_holder_and_is_found(pair: Served) -> None:
    check_a_returning_prefix_goes_to_its_holder(pair, PAGE)


def test_an_answer_is_known_to_routers_as_well(pair: Served) -> None:
    """Of a conversation the next turn begins with the last answer."""
    prompt = [700, *range(430, 470)]
    before = pair.ask(prompt, 40)
    turn = [*prompt, *before["nvext"]["completion_token_ids"], 81, 82, 83]
    # The last token of an answer is not computed, and of the others whole pages are kept.
    num_pages = (len(prompt) + 40 - 1) // PAGE
    assert pair.expected(turn) == (worker_of(before), num_pages)
    again = pair.ask(turn, 4)
    assert (worker_of(again), cached_of(again)) == (worker_of(before), num_pages * PAGE)


def test_sglang_metrics_are_exported_per_worker(pair: Served) -> None:
    told = pair.worker_metrics()
    assert len(told) == 2
    for each in told:
        found = re.search(r"^sglang:num_used_tokens\{.*worker_id=.*\} (\S+)$", each, re.MULTILINE)
        assert found is not None, [line for line in each.splitlines() if line.startswith("sglang:")]


def test_streams_of_a_killed_worker_continue(pair: Served) -> None:
    check_streams_of_a_killed_worker_go_on(pair, 300)
