from __future__ import annotations

from kvolt.engines.trtllm.admission import Admission


def test_first_come_first_served() -> None:
    admission = Admission(max_running=2, total_blocks=0)
    for name in "abc":
        admission.add(name, 1)
    assert admission.admit() == ["a", "b"]
    assert admission.admit() == []
    assert (admission.num_running, admission.num_waiting, admission.is_waiting("c")) == (2, 1, True)
    admission.drop("a")
    assert admission.admit() == ["c"]


def test_prompts_for_others_leave_room_for_the_longest() -> None:
    admission = Admission(max_running=100, total_blocks=20)
    for name in "abcdef":
        admission.add(name, 5, is_context_only=True)
    assert admission.admit() == list("abc")
    for name in "abc":
        admission.hold(name)
    admission.hold("nobody")
    assert admission.admit() == []
    assert (admission.num_running, admission.num_held_blocks, admission.reserve) == (0, 15, 5)
    admission.add("answer", 4)
    assert admission.admit() == ["answer"], "answers do not wait for prompts of others"
    admission.add("another", 2)
    assert admission.admit() == [], "there are no more blocks than there are"
    admission.drop("d")
    admission.drop("b")
    assert admission.admit() == ["another"]
    admission.drop("a")
    admission.drop("answer")
    assert admission.admit() == ["e"]


def test_one_that_is_too_long_comes_in_alone() -> None:
    admission = Admission(max_running=100, total_blocks=20)
    admission.add("huge", 19, is_context_only=True)
    admission.add("small", 2, is_context_only=True)
    assert admission.admit() == ["huge"]
    admission.drop("huge")
    assert admission.admit() == ["small"]
    admission.add("more", 8, is_context_only=True)
    assert admission.admit() == ["more"], "half of the blocks can always be used"
    admission.clear()
    assert (admission.num_running, admission.num_waiting, admission.num_blocks) == (0, 0, 0)


def test_no_overtaking() -> None:
    admission = Admission(max_running=100, total_blocks=20)
    admission.add("a", 12)
    admission.admit()
    admission.add("large", 9)
    admission.add("small", 1)
    assert admission.admit() == []


def test_unknown_number_of_blocks() -> None:
    admission = Admission(max_running=3, total_blocks=0)
    for name in "abcd":
        admission.add(name, 1000, is_context_only=True)
    assert admission.admit() == list("abc")
