"""What was sent to workers: counted once, freed once, and its time put right by what comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.ids import InstanceId
from kvolt.core.load import WorkerLoad
from kvolt.router.place import Place
from kvolt.router.policy.load import LoadBook, even_out
from kvolt.router.service.gossip import PlaceBookings


def figures(book: LoadBook, row: int) -> tuple[float, float, float, float, float]:
    return (
        float(book.prefill_tokens[row]),
        float(book.blocks[row]),
        float(book.requests[row]),
        float(book.decoding[row]),
        float(book.context_tokens[row]),
    )


def test_a_booking_counts_as_prompt_then_as_answer_then_not_at_all() -> None:
    book = LoadBook()
    row = book.add_row()
    ticket = book.book(row, 100, 60, 9.0, prefill_s=2.0, now=10.0)
    assert figures(book, row) == (60, 9, 1, 0, 0)
    assert book.idle_at[row] == 12.0
    assert book.begin(ticket, 12.0) is not None
    assert figures(book, row) == (0, 9, 1, 1, 100)
    assert book.free(ticket, 20.0) is not None
    assert figures(book, row) == (0, 0, 0, 0, 0)
    assert book.num_bookings == 0


def test_each_end_counts_once() -> None:
    book = LoadBook()
    row = book.add_row()
    ticket = book.book(row, 100, 100, 9.0, 2.0, 0.0)
    assert book.begin(ticket, 1.0) is not None
    assert book.begin(ticket, 2.0) is None
    assert book.free(ticket, 3.0) is not None
    assert book.free(ticket, 4.0) is None
    assert book.begin(ticket, 5.0) is None
    assert figures(book, row) == (0, 0, 0, 0, 0)


def test_prompts_queue_behind_each_other_and_a_late_one_delays_the_rest() -> None:
    book = LoadBook()
    row = book.add_row()
    first = book.book(row, 10, 10, 1.0, 2.0, 0.0)
    second = book.book(row, 10, 10, 1.0, 3.0, 1.0)
    assert book.idle_at[row] == 5.0
    book.begin(first, 3.5)  # a second and a half later than it should
    assert book.idle_at[row] == 6.5
    book.begin(second, 6.0)
    assert book.idle_at[row] == 6.0


def test_a_prompt_that_is_cancelled_gives_its_time_back() -> None:
    book = LoadBook()
    row = book.add_row()
    book.book(row, 10, 10, 1.0, 2.0, 0.0)
    second = book.book(row, 10, 10, 1.0, 3.0, 0.0)
    book.free(second, 1.0)
    assert book.idle_at[row] == 2.0


def test_one_that_was_half_done_gives_back_the_other_half() -> None:
    book = LoadBook()
    row = book.add_row()
    only = book.book(row, 10, 10, 1.0, 2.0, 0.0)
    book.free(only, 1.5)
    assert book.idle_at[row] == 1.5


def test_a_worker_that_is_gone_takes_its_bookings_along_and_its_row_starts_from_nothing() -> None:
    book = LoadBook()
    row = book.add_row()
    ticket = book.book(row, 10, 10, 1.0, 2.0, 0.0)
    book.drop_row(row)
    assert book.num_bookings == 0
    assert book.add_row() == row
    assert figures(book, row) == (0, 0, 0, 0, 0)
    assert book.free(ticket, 1.0) is None, "of the worker that was"


def test_there_may_be_more_rows_than_at_first() -> None:
    book = LoadBook()
    rows = [book.add_row() for _ in range(100)]
    tickets = [book.book(row, row, row, 1.0, 1.0, 0.0) for row in rows]
    assert [float(book.prefill_tokens[row]) for row in rows] == rows
    assert all(book.free(ticket, 0.0) is not None for ticket in tickets)


def test_what_a_worker_says_beyond_our_own_is_others() -> None:
    book = LoadBook()
    row = book.add_row()
    ticket = book.book(row, 10, 10, 4.0, 1.0, 0.0)
    book.on_report(row, WorkerLoad(running=3, waiting=1, kv_used_blocks=20))
    assert (book.requests[row], book.blocks[row]) == (4.0, 20.0)
    book.on_report(row, WorkerLoad(running=1, kv_used_blocks=9))
    assert (book.requests[row], book.blocks[row]) == (1.0, 4.0), "only ours is there"
    book.free(ticket, 1.0)
    assert (book.requests[row], book.blocks[row]) == (0.0, 0.0)


@given(st.lists(st.tuples(st.sampled_from("bgf"), st.integers(0, 9), st.floats(0, 5)), max_size=60))
def test_nothing_is_left_when_all_is_over(moves: list[tuple[str, int, float]]) -> None:
    book = LoadBook()
    rows = [book.add_row(), book.add_row()]
    tickets: list[int] = []
    now = 0.0
    for move, number, passed_s in moves:
        now += passed_s
        if move == "b":
            tickets.append(book.book(rows[number % 2], 10 + number, number, number, passed_s, now))
        elif tickets:
            ticket = tickets[number % len(tickets)]
            if move == "g":
                book.begin(ticket, now)
            else:
                book.free(ticket, now)
                tickets.remove(ticket)
    for ticket in tickets:
        assert book.free(ticket, now) is not None
    for row in rows:
        assert figures(book, row) == pytest.approx((0, 0, 0, 0, 0))
        assert book.idle_at[row] <= now + 1e-6 or not moves


def told(requests: float, decoding: float = 0.0, queue_s: float = 0.0) -> PlaceBookings:
    return PlaceBookings(InstanceId("w"), 0, requests, decoding, 30.0, 12.0, 70.0, queue_s)


def test_what_other_routers_tell_is_counted_with_ours_and_not_as_ours() -> None:
    book = LoadBook()
    row = book.add_row()
    place = Place(InstanceId("w"), 0)
    ours = book.book(row, 10, 8, 4.0, 1.0, 0.0)
    book.set_others(row, told(3, 2, queue_s=5.0), 0.0)
    assert figures(book, row) == (38, 16, 4, 2, 70)
    assert book.queue_s(np.array([row]), 2.0).tolist() == [3.0]
    assert book.queue_s(np.array([row]), 0.5).tolist() == [5.0]
    assert book.own({place: row}, 0.25) == [PlaceBookings(place.instance_id, 0, 1, 0, 8, 4, 0, 0.75)]
    book.begin(ours, 1.0)
    assert book.own({place: row}, 1.0) == [PlaceBookings(place.instance_id, 0, 1, 1, 0, 4, 10, 0)]
    book.free(ours, 1.0)
    assert book.own({place: row}, 1.0) == []
    book.set_others(row, PlaceBookings(place.instance_id), 1.0)
    assert figures(book, row) == (0, 0, 0, 0, 0)


def test_a_report_and_another_routers_word_are_the_same_requests() -> None:
    book = LoadBook()
    row = book.add_row()
    book.on_report(row, WorkerLoad(running=3, kv_used_blocks=20))
    book.set_others(row, told(2, 1), 0.0)
    assert figures(book, row) == (30, 20, 3, 2, 70), "one of the three is of somebody who tells nothing"
    book.on_report(row, WorkerLoad(running=1, kv_used_blocks=2))
    assert figures(book, row) == (30, 12, 2, 1, 70), "the report may be the older one"
    book.on_report(row, WorkerLoad())
    book.set_others(row, told(0), 0.0)
    assert book.requests[row] == 0


def test_what_is_in_use_is_the_workers_word_and_what_is_on_its_way() -> None:
    book = LoadBook()
    row = book.add_row()
    first = book.book(row, 100, 50, 10.0, 1.0, 0.0)
    assert book.used_blocks[row] == 10.0, "nothing was heard of it"
    book.on_report(row, WorkerLoad(running=1, kv_used_blocks=7))
    assert book.used_blocks[row] == 7.0 + 5.0, "half of its prompt is there"
    book.begin(first, 1.0)
    assert book.used_blocks[row] == 7.0
    second = book.book(row, 100, 100, 20.0, 1.0, 1.0)
    assert book.used_blocks[row] == 27.0
    book.free(second, 2.0)
    assert book.used_blocks[row] == 7.0
    book.free(first, 3.0)
    assert book.used_blocks[row] == 0.0, "whatever was heard last: nobody is there"


def test_load_evens_out_over_an_answer() -> None:
    requests, tokens = even_out(np.array([0.0, 4.0, 20.0]), np.array([0.0, 0.0, 0.0]))
    assert requests[0] == requests[1] == 8.0, "requests that come go there until it is at the average"
    assert requests[2] == pytest.approx(8.0 + 0.5 * (1 - 8 / 21) * 12)
    assert tokens.tolist() == [0.0, 0.0, 0.0]


def test_the_rate_of_bookings_and_of_prompts_is_of_the_last_seconds() -> None:
    book = LoadBook()
    row, idle = book.add_row(), book.add_row()
    for second in range(100):
        for _ in range(4):
            book.book(row, 100, 100, 10.0, 0.05, float(second))
    assert book.arrivals_per_s(99.5) == pytest.approx(4.0, rel=0.1)
    busy = book.prefill_share(np.array([row, idle]), 99.5)
    assert busy.tolist() == pytest.approx([0.2, 0.0], rel=0.1)
    assert book.arrivals_per_s(200.0) == pytest.approx(0.0, abs=1e-3)
