"""How long answers will be: what the like of them came to, within what is allowed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvolt.core.ids import RequestId
from kvolt.core.request import Grammar, GrammarKind, Request, RoutingHints, Sampling, StopConditions
from kvolt.router.policy.output_lengths import FIRST_GUESS, OutputLengths


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


def test_a_guess_while_nothing_is_known_and_never_more_than_is_allowed() -> None:
    lengths = OutputLengths()
    assert lengths.expected(asked()) == FIRST_GUESS
    assert lengths.expected(asked(max_tokens=7)) == 7
    assert lengths.expected(asked(min_tokens=1000)) == 1000
    assert lengths.expected(asked(choices=3, max_tokens=10)) == 30


def test_who_says_it_is_believed() -> None:
    lengths = OutputLengths()
    assert lengths.expected(asked(hint=33)) == 33
    assert lengths.expected(asked(hint=9999, max_tokens=50)) == 50
    assert lengths.expected(asked(ignore_eos=True, max_tokens=50)) == 50


def test_of_an_answer_that_goes_on_what_is_left_is_expected() -> None:
    lengths = OutputLengths()
    for _ in range(1000):
        lengths.learn(asked(), 100)
    whole = lengths.expected(asked())
    assert lengths.expected(replace(asked(), resume=(5,) * 30)) == whole - 30
    assert lengths.expected(replace(asked(), resume=(5,) * 500)) == 1, "more than was expected already"
    assert lengths.expected(replace(asked(hint=50), resume=(5,) * 30)) == 20
    assert lengths.expected(replace(asked(ignore_eos=True, max_tokens=50), resume=(5,) * 30)) == 20
    several = replace(asked(choices=4, hint=40), resume_choices=((5, 6), None, (), (5,) * 9))
    assert lengths.expected(several) == 8 + 10 + 1


def test_a_class_is_learned_and_the_others_are_told_apart() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.learn(asked(tenant="short"), 10)
        lengths.learn(asked(tenant="long"), 2000)
        lengths.learn(asked(tenant="long", grammar=True), 40)
    assert lengths.expected(asked(tenant="short")) == pytest.approx(10, abs=70)
    assert lengths.expected(asked(tenant="long")) == pytest.approx(2000, rel=0.06)
    assert lengths.expected(asked(tenant="long", grammar=True)) == pytest.approx(40, abs=20)
    assert 500 < lengths.expected(asked(tenant="new")) < 1500, "as those who ask for the like"
    assert lengths.expected(asked(tenant="long", max_tokens=100)) == 100


def test_it_follows_a_change() -> None:
    lengths = OutputLengths()
    for length in (1000, 100):
        for _ in range(300):
            lengths.learn(asked(), length)
    assert lengths.expected(asked()) == pytest.approx(100, abs=25)


def test_choices_count_each() -> None:
    lengths = OutputLengths()
    for _ in range(300):
        lengths.learn(asked(choices=4), 400)
    assert lengths.expected(asked()) == pytest.approx(100, abs=15)
    assert lengths.expected(asked(choices=2)) == pytest.approx(200, abs=30)


def test_classes_are_bounded_and_all_is_not_forgotten() -> None:
    lengths = OutputLengths(max_classes=50)
    for number in range(1000):
        lengths.learn(asked(tenant=f"t{number}"), 20)
    assert lengths.num_classes == 50
    assert lengths.expected(asked(tenant="another")) == pytest.approx(20, abs=5)


def test_what_is_typical_is_what_all_came_to() -> None:
    lengths = OutputLengths()
    assert lengths.typical == FIRST_GUESS
    for _ in range(300):
        lengths.learn(asked(tenant="short"), 10)
        lengths.learn(asked(tenant="long"), 90)
    assert lengths.typical == pytest.approx(50, abs=20)
