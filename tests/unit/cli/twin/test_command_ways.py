"""`kvolt twin --prefill N`: who computes prompts, and what was promised; and what a frontend is set to."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from kvolt.cli.frontend.command import prefill_mode_rules
from kvolt.cli.main import main
from kvolt.cli.twin.flags import add_cluster, report_settings, settings_of
from kvolt.journey.prefill_mode import PrefillModeRules
from kvolt.runtime.config.settings import FrontendSettings
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.report import TwinReport


def settings(*flags: str) -> TwinSettings:
    parser = argparse.ArgumentParser()
    add_cluster(parser)
    return settings_of(parser.parse_args(flags))


def test_the_limits_of_an_sla_are_what_was_promised() -> None:
    given = settings("--prefill", "1", "--sla", "ttft=500ms,itl=20ms,e2e=9s")
    assert (given.prefill_choice, given.target_ttft_s, given.target_itl_s) == ("predicted", 0.5, 0.02)
    given = settings("--prefill", "1", "--sla", "itl=20ms")
    assert (given.target_ttft_s, given.target_itl_s) == (None, 0.02)
    assert settings("--prefill", "1").target_ttft_s is None


def test_the_choice_is_told_where_there_is_one() -> None:
    parser = argparse.ArgumentParser()
    add_cluster(parser)
    told = []
    for flags in ([], ["--prefill", "1"], ["--prefill", "1", "--prefill-choice", "threshold"]):
        args = parser.parse_args(flags)
        told.append(report_settings(args, settings_of(args))["prefill choice"])
    assert told == [None, "predicted", "threshold"]


def test_an_unknown_choice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "--prefill", "1", "--prefill-choice", "maybe"]) != 0
    assert "known: predicted, threshold" in capsys.readouterr().err


def test_a_promise_changes_where_prompts_go(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for choice in ("predicted", "threshold"):
        flags = ["--workers", "1", "--prefill", "1", "--prefill-choice", choice, "--limit", "60"]
        load = ["--speed", "40", "--preset", "h200-llama-8b", "--sla", "ttft=1ms,itl=1ms", "--json"]
        assert main(["twin", *flags, *load]) == 0
        told.append(msgspec.json.decode(capsys.readouterr().out, type=TwinReport))
    assert told[0].latencies != told[1].latencies
    assert all(report.counts.complete == 60 for report in told)


def test_a_frontend_has_the_same_choice() -> None:
    assert prefill_mode_rules(FrontendSettings()) == PrefillModeRules()
    given = FrontendSettings(
        prefill_choice="threshold",
        prefill_min_tokens=7,
        prefill_max_queue_s=0.5,
        target_ttft_s=0.3,
        target_itl_s=0.02,
    )
    told = PrefillModeRules(is_predicted=False, min_tokens=7, max_queue_s=0.5, ttft_s=0.3, itl_s=0.02)
    assert prefill_mode_rules(given) == told
