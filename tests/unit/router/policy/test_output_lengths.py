"""Expected answer lengths: classes, blending, limits of the request."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvolt.core.ids import RequestId
from kvolt.core.request import Grammar, GrammarKind, Request, RoutingHints, Sampling, StopConditions
from kvolt.router.policy.output_lengths import FIRST_GUESS, OutputLengthEstimator


def asked(
    *,
    tenant: str | None = None,
    lora: str | None = None,
    max_tokens: int = 4096,
    hint: int | None = None,
    grammar: bool = False,
    choices: int = 1,
    ignore_eos: bool = False,
    min_tokens: int = 0,
) -> Request:
    return Request(
        request_id=RequestId("r"),
        model="m",
        token_ids=(1,),
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos, min_tokens=min_tokens),
        sampling=Sampling(num_choices=choices),
        grammar=Grammar(GrammarKind.REGEX, "a+") if grammar else None,
        lora=lora,
        routing=RoutingHints(tenant=tenant, expected_output_tokens=hint),
    )


def test_the_default_length_is_limited_by_the_request() -> None:
    lengths = OutputLengthEstimator()
    assert lengths.expected_tokens(asked()) == FIRST_GUESS
    assert lengths.expected_tokens(asked(max_tokens=7)) == 7
    assert lengths.expected_tokens(asked(min_tokens=1000)) == 1000
    assert lengths.expected_tokens(asked(choices=3, max_tokens=10)) == 30


def test_a_stated_length_is_used() -> None:
    lengths = OutputLengthEstimator()
    assert lengths.expected_tokens(asked(hint=33)) == 33
    assert lengths.expected_tokens(asked(hint=9999, max_tokens=50)) == 50
    assert lengths.expected_tokens(asked(ignore_eos=True, max_tokens=50)) == 50


def test_a_migrated_answer_counts_with_its_remaining_tokens() -> None:
    lengths = OutputLengthEstimator()
    for _ in range(1000):
        lengths.record(asked(), 100)
    whole = lengths.expected_tokens(asked())
    assert lengths.expected_tokens(replace(asked(), prior_tokens=(5,) * 30)) == whole - 30
    assert lengths.expected_tokens(replace(asked(), prior_tokens=(5,) * 500)) == 1, (
        "more than was expected already"
    )
    assert lengths.expected_tokens(replace(asked(hint=50), prior_tokens=(5,) * 30)) == 20
    assert (
        lengths.expected_tokens(replace(asked(ignore_eos=True, max_tokens=50), prior_tokens=(5,) * 30)) == 20
    )
    several = replace(asked(choices=4, hint=40), prior_tokens_by_choice=((5, 6), None, (), (5,) * 9))
    assert lengths.expected_tokens(several) == 8 + 10 + 1


def test_classes_are_learned_separately() -> None:
    lengths = OutputLengthEstimator()
    for _ in range(100):
        lengths.record(asked(tenant="short"), 10)
        lengths.record(asked(tenant="long"), 2000)
        lengths.record(asked(tenant="long", grammar=True), 40)
    assert lengths.expected_tokens(asked(tenant="short")) == pytest.approx(10, abs=70)
    assert lengths.expected_tokens(asked(tenant="long")) == pytest.approx(2000, rel=0.06)
    assert lengths.expected_tokens(asked(tenant="long", grammar=True)) == pytest.approx(40, abs=20)
    assert 500 < lengths.expected_tokens(asked(tenant="new")) < 1500, "like other requests of that form"
    assert lengths.expected_tokens(asked(tenant="long", max_tokens=100)) == 100


def test_it_follows_a_change() -> None:
    lengths = OutputLengthEstimator()
    for length in (1000, 100):
        for _ in range(300):
            lengths.record(asked(), length)
    assert lengths.expected_tokens(asked()) == pytest.approx(100, abs=25)


def test_choices_count_each() -> None:
    lengths = OutputLengthEstimator()
    for _ in range(300):
        lengths.record(asked(choices=4), 400)
    assert lengths.expected_tokens(asked()) == pytest.approx(100, abs=15)
    assert lengths.expected_tokens(asked(choices=2)) == pytest.approx(200, abs=30)


def test_classes_are_bounded_and_all_is_not_forgotten() -> None:
    lengths = OutputLengthEstimator(max_classes=50)
    for number in range(1000):
        lengths.record(asked(tenant=f"t{number}"), 20)
    assert lengths.num_classes == 50
    assert lengths.expected_tokens(asked(tenant="another")) == pytest.approx(20, abs=5)


def test_what_is_typical_is_what_all_came_to() -> None:
    lengths = OutputLengthEstimator()
    assert lengths.typical == FIRST_GUESS
    for _ in range(300):
        lengths.record(asked(tenant="short"), 10)
        lengths.record(asked(tenant="long"), 90)
    assert lengths.typical == pytest.approx(50, abs=20)
