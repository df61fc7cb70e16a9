"""The capability protocols: asked for by their methods, at most six of them each."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.testing.toy_engine import ToyArguments, ToyEngine

from kvolt.core.errors import Unsupported
from kvolt.core.request import Role, Sampling
from kvolt.engines.contract import FEATURES, Engine, EngineSpec, check_sampling_fields, features_of
from kvolt.engines.native.shell.engine import NativeEngine
from kvolt.engines.sglang.engine import SglangEngine
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.trtllm.engine import TrtllmEngine
from kvolt.engines.vllm.engine import VllmEngine

SPEC = EngineSpec(model="m", role=Role.AGGREGATED)


def methods(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


async def test_an_engine_offers_what_it_has_the_methods_of() -> None:
    of_both = ("KvEvents", "KvVisible", "KvMovable", "KvAddressable", "KvTierable", "Prefill")
    assert features_of(ToyEngine(SPEC, ToyArguments())) == of_both
    assert features_of(SimEngine(SPEC, SimArguments())) == (*of_both, "Sleep")

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


ENGINES = (NativeEngine, SglangEngine, SimEngine, TrtllmEngine, VllmEngine)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_name_their_sampling_fields(engine: Any) -> None:
    assert engine.sampling_fields <= set(Sampling.__struct_fields__)


def test_our_engines_implement_all_sampling_fields() -> None:
    assert NativeEngine.sampling_fields == SimEngine.sampling_fields == set(Sampling.__struct_fields__)


def test_what_an_engine_does_not_declare_is_refused_when_it_is_set() -> None:
    supported = SglangEngine.sampling_fields
    check_sampling_fields(Sampling(temperature=0.5, logit_bias={1: 2.0}), supported, "sglang")
    with pytest.raises(Unsupported, match="sglang does not support allowed_token_ids") as caught:
        check_sampling_fields(Sampling(allowed_token_ids=(3,)), supported, "sglang")
    assert caught.value.fields["param"] == "allowed_token_ids"
    missing = {"prompt_logprobs": 0, "logit_bias": {1: 2.0}, "allowed_token_ids": (1,)}
    assert set(missing).isdisjoint(TrtllmEngine.sampling_fields)
    for name, value in missing.items():
        with pytest.raises(Unsupported, match=name):
            check_sampling_fields(
                replace(Sampling(), **{name: value}), TrtllmEngine.sampling_fields, "trtllm"
            )
