"""Whether the index is right about a worker: one error is none, many are, and agreement heals."""

from __future__ import annotations

import random

from kvolt.core.ids import InstanceId
from kvolt.router.index.health import Promise, TrustBook, TrustChange, TrustOptions

A, B = InstanceId("a"), InstanceId("b")


def reports(
    book: TrustBook, number: int, held: int, cached: int, now: float = 0.0, expected: int | None = None
) -> list[TrustChange]:
    promise = Promise(held, held if expected is None else expected)
    told = [book.report(A, promise, cached, now) for _ in range(number)]
    return [each for each in told if each is not None]


def test_a_worker_that_has_what_was_said_stays_trusted() -> None:
    book = TrustBook()
    assert reports(book, 100, held=20, cached=20) == []
    assert reports(book, 100, held=20, cached=19) == [], "a block more or less is none"
    assert (book.is_trusted(A), book.error_of(A), book.num_wrong) == (True, 0.0, 0)


def test_one_that_has_nothing_of_it_is_flagged_once_after_enough_reports() -> None:
    book = TrustBook(TrustOptions(min_reports=16))
    assert reports(book, 15, held=20, cached=0) == []
    assert reports(book, 1, held=20, cached=0) == [TrustChange.FLAGGED]
    assert reports(book, 50, held=20, cached=0) == []
    assert not book.is_trusted(A)
    assert book.is_trusted(B)
    assert (book.flagged, book.num_flaggings, book.num_wrong) == ([A], 1, 66)


def test_one_that_has_more_than_was_said_is_flagged_too() -> None:
    book = TrustBook()
    assert reports(book, 20, held=0, cached=20) == [TrustChange.FLAGGED]


def test_prompts_of_which_nobody_has_anything_say_nothing() -> None:
    book = TrustBook()
    reports(book, 15, held=20, cached=0)
    assert reports(book, 1000, held=0, cached=0) == []
    assert book.num_reports == 15
    assert reports(book, 1, held=20, cached=0) == [TrustChange.FLAGGED], "they have not washed it out"


def test_what_was_on_its_way_may_have_come_or_not() -> None:
    book = TrustBook()
    for cached in (4, 10, 20):
        assert reports(book, 100, held=4, expected=20, cached=cached) == []
        assert book.error_of(A) == 0.0
    assert reports(book, 100, held=0, expected=4, cached=20) == [TrustChange.FLAGGED]


def test_evictions_now_and_then_are_no_reason() -> None:
    book, rng = TrustBook(), random.Random(3)
    for _ in range(5000):
        cached = 0 if rng.random() < 0.2 else 20
        assert book.report(A, Promise(20, 20), cached, 0.0) is None


def test_it_is_trusted_again_when_it_agreed_for_a_while() -> None:
    book = TrustBook(TrustOptions(min_agreeing=32, min_flagged_s=10.0))
    reports(book, 20, held=20, cached=0)
    assert reports(book, 40, held=20, cached=20, now=9.0) == [], "not so soon"
    assert reports(book, 1, held=20, cached=20, now=11.0) == [TrustChange.CLEARED]
    assert book.is_trusted(A)
    assert reports(book, 15, held=20, cached=0, now=12.0) == [], "and it needs as much evidence as before"
    assert reports(book, 1, held=20, cached=0, now=12.0) == [TrustChange.FLAGGED]
    assert reports(book, 31, held=20, cached=20, now=99.0) == []
    assert reports(book, 1, held=20, cached=20, now=99.0) == [TrustChange.CLEARED]


def test_half_agreement_does_not_heal() -> None:
    book = TrustBook()
    reports(book, 20, held=20, cached=0)
    for _ in range(500):
        assert book.report(A, Promise(20, 20), 20, 99.0) is None
        assert book.report(A, Promise(20, 20), 0, 99.0) is None


def test_one_that_is_gone_is_forgotten() -> None:
    book = TrustBook()
    reports(book, 20, held=20, cached=0)
    book.drop(A)
    book.drop(A)
    assert (book.is_trusted(A), book.flagged, book.error_of(A)) == (True, [], 0.0)
