"""Conformance suite of the request plane, for any transport and event loop.

A case is an async function of a `Harness`, which the author of a plane implements: it creates a `RequestPlane` and
breaks the network between processes. With pytest, on a real loop:

    @pytest.mark.parametrize("case", plane_suite.CASES, ids=plane_suite.name) async def test_plane(case):
        await plane_suite.run_case(case, MyHarness)

and on the virtual loop: `run_virtual(lambda: run_case(case, MyHarness), until_s=600)`. The cases for
deadlines, losses and shutdown are in `faults_suite`.
"""

from __future__ import annotations

from kvolt.testing.cases import name
from kvolt.testing.plane.call_cases import CALL_CASES
from kvolt.testing.plane.cancel_cases import CANCEL_CASES
from kvolt.testing.plane.error_cases import ERROR_CASES
from kvolt.testing.plane.flow_cases import FLOW_CASES
from kvolt.testing.plane.harness import Case, Harness, ProcessPorts, run_case
from kvolt.testing.plane.port_cases import PORT_CASES

__all__ = ["CASES", "Case", "Harness", "ProcessPorts", "name", "run_case"]

CASES: tuple[Case, ...] = (*PORT_CASES, *CALL_CASES, *ERROR_CASES, *FLOW_CASES, *CANCEL_CASES)
