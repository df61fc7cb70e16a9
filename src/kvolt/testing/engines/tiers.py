"""Tiers of the engine suite: an engine must pass those of the capabilities that it offers.

@pytest.mark.parametrize("case", suites_for(MyEngine(...)), ids=lambda case: case.__name__) async def
test_conformance(case):
    await case(MyHarness())
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvolt.engines.contract import features_of
from kvolt.testing.engines import event_cases as engine_event_cases
from kvolt.testing.engines import handoff_cases as engine_handoff_cases
from kvolt.testing.engines import kept_cases as engine_kept_cases
from kvolt.testing.engines import parts_cases as engine_parts_cases
from kvolt.testing.engines import placed_cases as engine_placed_cases
from kvolt.testing.engines import suite as engine_suite
from kvolt.testing.engines import tierable_cases as engine_tierable_cases
from kvolt.testing.engines import visible_cases as engine_visible_cases
from kvolt.testing.engines.harness import Case

__all__ = ["TIERS", "Tier", "suites_for"]


class Tier(msgspec.Struct, frozen=True):
    name: str
    needs: tuple[str, ...]
    """Names of the capability protocols that the cases need."""
    cases: tuple[Case, ...]

    def missing(self, features: Collection[str]) -> tuple[str, ...]:
        """Required capabilities that are not in `features`."""
        return tuple(name for name in self.needs if name not in features)


TIERS = (
    Tier("core", (), engine_suite.CASES),
    Tier("events", ("KvEvents",), engine_event_cases.CASES),
    Tier("kv-visible", ("KvEvents", "KvVisible"), engine_visible_cases.CASES),
    Tier("handoff", ("Prefill",), engine_handoff_cases.CASES),
    Tier(
        "kv-placed",
        ("Prefill", "KvAddressable"),
        engine_placed_cases.CASES + engine_parts_cases.CASES + engine_kept_cases.CASES,
    ),
    Tier("kv-tiers", ("Prefill", "KvAddressable", "KvTierable"), engine_tierable_cases.CASES),
)


def suites_for(engine: object) -> tuple[Case, ...]:
    """Cases of all tiers that this engine supports, core first."""
    features = features_of(engine)
    return tuple(case for tier in TIERS if not tier.missing(features) for case in tier.cases)
