"""SLO gate: whether prompts are prefilled remotely under a load, given TTFT and ITL targets."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.unit.journey.test_prefill_mode import HANDED, IDLE

from kvolt.journey.slo_gate import DecayingAverage, SloGate
from kvolt.router.selection.forecast import Forecast


class GateProbe:
    """An SLO gate and its clock."""

    def __init__(self, ttft_s: float | None = None, itl_s: float | None = None) -> None:
        self.time_s = 0.0
        self.gate = SloGate(ttft_s, itl_s, lambda: self.time_s)

    def ask(
        self, handed: Forecast = HANDED, there: Forecast = IDLE, *, times: int = 1, every_s: float = 1.0
    ) -> bool:
        for _ in range(times):
            self.time_s += every_s
            is_met = self.gate.is_met(handed, there)
        return is_met


def test_without_limits_nothing_is_promised() -> None:
    assert not GateProbe().gate.is_configured
    assert GateProbe(ttft_s=1.0).gate.is_configured
    assert GateProbe(itl_s=1.0).gate.is_configured
    assert GateProbe(itl_s=1.0).ask(there=replace(IDLE, queue_s=100.0)), "of a first token nothing was said"
    assert GateProbe(ttft_s=1.0).ask(replace(HANDED, step_s=1.0)), "nor of the next ones"


def test_prompts_that_wait_too_long_break_it() -> None:
    probe = GateProbe(ttft_s=1.0)
    assert probe.ask(there=replace(IDLE, queue_s=0.6), times=20)
    assert not probe.ask(there=replace(IDLE, queue_s=0.8), times=20)


def test_one_that_waits_long_does_not_break_it() -> None:
    probe = GateProbe(ttft_s=1.0)
    assert probe.ask(times=20)
    assert probe.ask(there=replace(IDLE, queue_s=1.5))


def test_more_prompts_than_can_be_computed_apart_break_it_before_they_wait() -> None:
    """A queue would be long by the time it is seen; computed by both workers there is none."""
    probe = GateProbe(ttft_s=1.0)
    assert probe.ask(times=40, every_s=0.4)
    assert not probe.ask(times=120, every_s=0.1)


def test_a_lost_one_is_found_again_well_below() -> None:
    probe = GateProbe(ttft_s=0.5)
    assert not probe.ask(times=40, every_s=0.1)
    assert not probe.ask(times=60, every_s=0.13)
    assert probe.ask(times=40, every_s=1.0)


def test_more_places_take_more_prompts() -> None:
    kept = [
        GateProbe(ttft_s=1.0).ask(
            there=replace(IDLE, num_worker_ranks=num_worker_ranks), times=60, every_s=0.1
        )
        for num_worker_ranks in (1, 4)
    ]
    assert kept == [False, True]


def test_slow_steps_break_it_and_it_is_found_again_only_well_below() -> None:
    probe = GateProbe(itl_s=0.02)
    many = replace(HANDED, decoding=60.0, total_decoding=60.0, base_step_s=0.0088, added_step_s=0.0002)
    steps = [
        replace(many, decoding=decoding, total_decoding=decoding, step_s=0.0088 + 0.0002 * (decoding + 1.0))
        for decoding in (50.0, 60.0, 55.0, 20.0, 50.0)
    ]
    assert [probe.ask(step, times=30) for step in steps] == [True, False, False, True, True]


def test_a_lost_one_is_found_again_when_there_is_nothing_to_do() -> None:
    probe = GateProbe(itl_s=0.02)
    many = replace(
        HANDED, decoding=60.0, total_decoding=60.0, step_s=0.021, base_step_s=0.0088, added_step_s=0.0002
    )
    assert not probe.ask(many, times=30)
    none = replace(
        HANDED, decoding=0.0, total_decoding=0.0, step_s=0.009, base_step_s=0.0088, added_step_s=0.0002
    )
    assert probe.ask(none, times=30, every_s=10.0)


def test_answers_that_come_while_one_is_given_make_its_steps_longer() -> None:
    """Of those that are being given now it is not to be seen yet."""
    quick = replace(HANDED, step_s=0.012, base_step_s=0.007, added_step_s=0.001)
    idle = replace(IDLE, prefill_s=0.001)
    assert GateProbe(itl_s=0.02).ask(quick, idle, times=40, every_s=0.5)
    assert not GateProbe(itl_s=0.02).ask(quick, idle, times=80, every_s=0.13)


def test_answers_that_are_given_elsewhere_would_come_back() -> None:
    """Steps are short here because others answer: with all of them they were not."""
    probe = GateProbe(itl_s=0.02)
    handed = replace(
        HANDED, decoding=10.0, total_decoding=10.0, step_s=0.01, base_step_s=0.0078, added_step_s=0.0002
    )
    assert probe.ask(handed, replace(IDLE, total_decoding=20.0))
    assert not probe.ask(handed, replace(IDLE, total_decoding=100.0))


def test_where_neither_way_keeps_it_the_one_that_strains_it_less_is_taken() -> None:
    """Long prompts that take nearly all of three workers: answers beside them would stand still."""
    handed = replace(
        HANDED, step_s=0.012, base_step_s=0.0054, added_step_s=0.0006, decoding=10.0, total_decoding=10.0
    )
    long = replace(IDLE, prefill_s=0.57, num_worker_ranks=3)
    probe = GateProbe(ttft_s=2.5, itl_s=0.02)
    assert probe.ask(handed, long, times=100, every_s=0.3)
    assert probe.ask(handed, long, times=100, every_s=0.22)
    assert probe.gate._remote_strain(handed, long) > 1.0, "or this is another test"
    short = replace(IDLE, prefill_s=0.1)
    assert not GateProbe(ttft_s=0.6, itl_s=0.02).ask(handed, short, times=100, every_s=0.1)


def test_recent_values() -> None:
    time_s = 0.0
    recent = DecayingAverage(lambda: time_s, 4.0)
    assert recent.mean == 0.0
    for _ in range(100):
        time_s += 0.1
        recent.add(2.0)
    assert recent.mean == pytest.approx(2.0)
    assert recent.per_second == pytest.approx(20.0, rel=0.05)
    for _ in range(100):
        time_s += 1.0
        recent.add(4.0)
    assert recent.mean == pytest.approx(4.0, rel=0.01)
    assert recent.per_second == pytest.approx(4.0, rel=0.1)
