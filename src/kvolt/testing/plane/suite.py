"""Conformance suite of a request plane: what a call must do, on any transport and any loop.

A case is an async function of a `Harness`, a class that a plane's author completes: what makes a `RequestPlane`,
and how to break the way between processes. With pytest, on a real loop:

    @pytest.mark.parametrize("case", plane_suite.CASES, ids=plane_suite.name)
    async def test_plane(case):
        await plane_suite.run_case(case, MyHarness)

and on the virtual loop: `run_virtual(lambda: run_case(case, MyHarness), until_s=600)`. The cases about
deadlines, losses and stopping are in `plane_faults_suite`.
"""

from __future__ import annotations

from kvolt.testing.plane.call_cases import CALL_CASES
from kvolt.testing.plane.cancel_cases import CANCEL_CASES
from kvolt.testing.plane.error_cases import ERROR_CASES
from kvolt.testing.plane.flow_cases import FLOW_CASES
from kvolt.testing.plane.harness import (
    ENDPOINT,
    Case,
    Ground,
    Harness,
    Probe,
    answers,
    client_of,
    collect,
    count_to,
    fails,
    name,
    run_case,
    served,
    until,
)
from kvolt.testing.plane.port_cases import PORT_CASES

__all__ = [
    "CASES",
    "ENDPOINT",
    "Case",
    "Ground",
    "Harness",
    "Probe",
    "answers",
    "client_of",
    "collect",
    "count_to",
    "fails",
    "name",
    "run_case",
    "served",
    "until",
]

CASES: tuple[Case, ...] = (*PORT_CASES, *CALL_CASES, *ERROR_CASES, *FLOW_CASES, *CANCEL_CASES)
