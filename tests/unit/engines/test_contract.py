"""The capability protocols: asked for by their methods, at most six of them each."""

from __future__ import annotations

import pytest
from tests.unit.testing.toy_engine import ToyArguments, ToyEngine

from kvolt.core.request import Role
from kvolt.engines.contract import FEATURES, Engine, EngineSpec, features_of
from kvolt.engines.sim.engine import SimArguments, SimEngine

SPEC = EngineSpec(model="m", role=Role.AGGREGATED)


def methods(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


async def test_an_engine_offers_what_it_has_the_methods_of() -> None:
    for engine in (SimEngine(SPEC, SimArguments()), ToyEngine(SPEC, ToyArguments())):
        assert features_of(engine) == (
            "KvEvents",
            "KvVisible",
            "KvMovable",
            "KvPlaced",
            "KvTierable",
            "Prefill",
        )

    class Half:
        async def load_lora(self, name: str, path: str) -> None: ...

        def loras(self) -> tuple[str, ...]:
            return ()

    assert features_of(Half()) == (), "a part of a protocol is not the protocol"


@pytest.mark.parametrize("protocol", FEATURES.values(), ids=list(FEATURES))
def test_a_port_is_small(protocol: type) -> None:
    assert 1 <= len(methods(protocol)) <= 6
    assert protocol.__doc__


def test_no_two_ports_share_a_method() -> None:
    every = [name for protocol in (Engine, *FEATURES.values()) for name in methods(protocol)]
    assert len(every) == len(set(every)), "an engine would offer what it does not mean to"
