"""What users of `kvolt.testing` build on: a change here is a change of its interface."""

from __future__ import annotations

import kvolt.testing

PUBLIC = {
    "Deadlock",
    "InlineBlocking",
    "Leak",
    "LinkProfile",
    "Runaway",
    "Unhandled",
    "VirtualClock",
    "VirtualHost",
    "VirtualLoop",
    "VirtualNetwork",
    "VirtualProcess",
    "discovery_suite",
    "events_suite",
    "plane_faults_suite",
    "plane_suite",
    "run_virtual",
}

SUITE = {"CASES", "Harness"}


def test_the_package_exports_these_names_and_no_others() -> None:
    assert set(kvolt.testing.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(kvolt.testing, name) is not None


def test_a_suite_has_cases_and_says_what_it_needs() -> None:
    for suite in (getattr(kvolt.testing, name) for name in PUBLIC if name.endswith("_suite")):
        assert vars(suite).keys() >= SUITE, suite.__name__
        names = [case.__name__ for case in suite.CASES]
        assert len(names) == len(set(names)), f"{suite.__name__} runs a case twice"
        assert all(case.__module__.startswith("kvolt.testing") for case in suite.CASES)
