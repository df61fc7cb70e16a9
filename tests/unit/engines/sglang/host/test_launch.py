"""How SGLang's arguments are made, as far as that needs no SGLang."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.host.launch import launch, server_args
from kvolt.engines.sglang.host.messages import Start
from kvolt.runtime.clock import SystemClock

SPEC = EngineSpec(model="m", role=Role.AGGREGATED)


def test_a_user_s_own_come_before_ours() -> None:
    given = server_args(SPEC, SglangArguments(engine_args={"page_size": 64, "tp_size": 2}), "/m")
    assert (given["model_path"], given["page_size"], given["tp_size"]) == ("/m", 64, 2)
    config = json.loads(given["kv_events_config"])
    assert config["publisher"] == "zmq"
    assert config["bind"] is True
    assert config["endpoint"].startswith("tcp://127.0.0.1:")
    assert config["endpoint"] != config["replay_endpoint"]


def test_events_as_a_table_are_what_sglang_reads() -> None:
    own = {"publisher": "zmq", "endpoint": "tcp://*:5557"}
    given = server_args(SPEC, SglangArguments(engine_args={"kv_events_config": own}), "/m")
    assert json.loads(given["kv_events_config"]) == own


def test_roles() -> None:
    prefill = server_args(EngineSpec(model="m", role=Role.PREFILL), SglangArguments(), "/m")
    decode = server_args(EngineSpec(model="m", role=Role.DECODE), SglangArguments(), "/m")
    assert (prefill["disaggregation_mode"], decode["disaggregation_mode"]) == ("prefill", "decode")
    assert "kv_events_config" in prefill
    assert "kv_events_config" not in decode, "it keeps no prefixes"
    assert "kv_events_config" not in server_args(SPEC, SglangArguments(kv_events=False), "/m")


@pytest.mark.parametrize("name", ["model_path", "skip_tokenizer_init"])
def test_what_is_not_an_argument_s_to_say(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        server_args(SPEC, SglangArguments(engine_args={name: "x"}), "/m")


@pytest.mark.skipif(find_spec("sglang") is not None, reason="it is installed here")
def test_without_sglang_it_says_so() -> None:
    with pytest.raises(ConfigError, match="not installed"):
        launch(Start(SPEC, SglangArguments(), "/m", "/tmp", 30), SystemClock())
