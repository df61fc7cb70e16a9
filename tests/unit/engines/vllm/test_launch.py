"""How vLLM is started: its arguments from ours, what it says of itself, and settings that it cannot be started with."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.engines.vllm import stand_in
from tests.unit.engines.vllm.lab import make_model, only_llm
from tests.unit.engines.vllm.stand_in import AsyncEngineArgs, AsyncLLM, KVEventsConfig, KVTransferConfig

from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.requirements import check_requirement
from kvolt.engines.vllm.arguments import VllmArguments, VllmTiers
from kvolt.engines.vllm.launch import (
    EXTENSION,
    NIXL,
    TIERED_NIXL,
    TIERS,
    Launched,
    engine_args,
    launch,
    socket_folder,
    weights_identity,
)
from kvolt.engines.vllm.symbols import REQUIREMENT
from kvolt.runtime.clock import SystemClock

PLAIN = VllmArguments()
TIERED = VllmArguments(tiers=VllmTiers(host="2GiB", disk="4GiB"))


class Launcher:
    """Launches into a folder of its own, and shuts down what it has launched."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model = model
        self.folder = folder

    def __call__(
        self, arguments: VllmArguments = PLAIN, role: Role = Role.AGGREGATED, **args: Any
    ) -> Launched:
        arguments = replace(arguments, engine_args={**arguments.engine_args, **args})
        return launch(EngineSpec(model=self.model, role=role), arguments, self.folder, SystemClock())

    def args(
        self, arguments: VllmArguments = PLAIN, role: Role = Role.AGGREGATED, **args: Any
    ) -> dict[str, Any]:
        arguments = replace(arguments, engine_args={**arguments.engine_args, **args})
        return engine_args(EngineSpec(model="m", role=role), arguments, Path("/model"), self.folder)

    def refusal(self, arguments: VllmArguments = PLAIN, **args: Any) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            self(arguments, **args)
        assert caught.value.fields["remedy"]
        return caught.value


@pytest.fixture
def launched(model: str) -> Iterator[Launcher]:
    with socket_folder() as folder:
        yield Launcher(model, Path(folder))
        for llm in AsyncLLM.made:
            if not llm.num_shutdowns:
                llm.shutdown()


# --- what it says of itself


def test_the_card_is_that_of_the_folder(launched: Launcher) -> None:
    found = launched(VllmArguments(served_name="tiny"))
    card = found.card
    assert (card.name, card.context_length, card.block_size) == ("tiny", 256, 16)
    assert (card.eos_token_ids, card.bos_token_id) == ((2, 5), None)
    assert card.chat_template == "{{ x }}"
    assert card.defaults == {"temperature": 0.7, "top_k": 20}
    assert found.vocab_size == 1000
    assert (found.limits.context_length, found.limits.max_waiting, found.limits.max_num_seqs) == (
        256,
        2048,
        48,
    )


def test_without_a_name_it_is_called_as_it_was_found(launched: Launcher) -> None:
    assert launched().card.name == launched.model


def test_one_block_stands_for_nothing(launched: Launcher) -> None:
    assert launched(num_gpu_blocks_override=97).info.capacity.kv_total_blocks == 96


@pytest.mark.parametrize(
    ("arguments", "role", "args", "features"),
    [
        (VllmArguments(), Role.AGGREGATED, {}, ("KvEvents",)),
        (VllmArguments(kv_events=False), Role.AGGREGATED, {}, ()),
        (VllmArguments(), Role.PREFILL, {}, ("KvEvents", "Prefill")),
        (VllmArguments(loras={"a": "/a"}), Role.AGGREGATED, {}, ("KvEvents", "Lora")),
        (VllmArguments(), Role.AGGREGATED, {"enable_sleep_mode": True}, ("KvEvents", "Sleep")),
        (VllmArguments(), Role.AGGREGATED, {"kv_transfer_config": {"kv_connector": "Other"}}, ("KvEvents",)),
    ],
    ids=["plain", "no events", "prefill", "lora", "sleep", "another connector"],
)
def test_features(
    launched: Launcher, arguments: VllmArguments, role: Role, args: dict[str, Any], features: tuple[str, ...]
) -> None:
    found = launched(arguments, role, **args)
    assert found.info.features == features
    assert found.info.role is role
    assert found.moves_kv == ("Prefill" in features)
    assert found.info.kv_events == bool(found.events) == ("KvEvents" in features)


@pytest.mark.parametrize(
    ("role", "args", "extras"),
    [
        (Role.AGGREGATED, {}, ("vllm_xargs",)),
        (Role.AGGREGATED, {"enable_prompt_embeds": True}, ("vllm_xargs", "prompt_embeds")),
        (Role.DECODE, {"enable_prompt_embeds": True}, ("vllm_xargs",)),
    ],
)
def test_what_frontends_may_send_it_besides(
    launched: Launcher, role: Role, args: dict[str, Any], extras: tuple[str, ...]
) -> None:
    assert launched(role=role, **args).info.extras == extras


def test_where_events_come_from(launched: Launcher) -> None:
    assert launched().events == {
        0: (f"ipc://{launched.folder}/kv-events", f"ipc://{launched.folder}/kv-replay")
    }


def test_a_model_without_a_tokenizer_leaves_no_engine(launched: Launcher) -> None:
    (Path(launched.model) / "tokenizer.json").unlink()
    assert "tokenizer.json" in launched.refusal().message
    assert only_llm().num_shutdowns == 1


# --- its arguments


def test_what_kvolt_needs_and_what_a_user_says(launched: Launcher) -> None:
    given = launched.args(max_model_len=99, max_logprobs=5)
    assert (given["model"], given["max_model_len"], given["max_logprobs"]) == ("/model", 99, 5)
    assert (given["enable_prefix_caching"], given["worker_extension_cls"]) == (True, EXTENSION)
    assert "enable_lora" not in given
    assert "kv_transfer_config" not in given
    events = given["kv_events_config"]
    assert isinstance(events, KVEventsConfig)
    assert (events.enable_kv_cache_events, events.publisher) == (True, "zmq")
    assert launched.args(VllmArguments(loras={"a": "/a"}))["enable_lora"] is True
    assert "kv_events_config" not in launched.args(VllmArguments(kv_events=False))


def test_several_ranks_have_ports(launched: Launcher) -> None:
    events = launched.args(data_parallel_size=2)["kv_events_config"]
    assert (events.endpoint, events.replay_endpoint) == ("tcp://*:0", "tcp://*:0")


@pytest.mark.parametrize(("role", "kv_role"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")])
def test_role_selects_its_connector(launched: Launcher, role: Role, kv_role: str) -> None:
    transfer = launched.args(VllmArguments(hold_s=2.2), role)["kv_transfer_config"]
    assert transfer == KVTransferConfig(
        kv_connector=NIXL,
        kv_role=kv_role,
        kv_connector_module_path="kvolt.engines.vllm.plugins.nixl_connector",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"kv_lease_duration": 3},
        kv_buffer_device="cpu",
    )
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.1.2.3"
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "0", "the connector binds a free port"


def test_where_a_user_says_it_is_met_it_is_met(launched: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5777")
    launched.args(role=Role.DECODE)
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5777"


def test_a_users_own_connector_is_left_alone(launched: Launcher) -> None:
    own = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    transfer = launched.args(role=Role.AGGREGATED, kv_transfer_config=own)["kv_transfer_config"]
    assert transfer == KVTransferConfig(**own)
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in os.environ


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("kind", [dict, KVTransferConfig])
def test_no_handoff_by_a_connector_that_does_not_check_its_reads(
    launched: Launcher, role: Role, kind: Any
) -> None:
    own = kind(kv_connector="NixlConnector", kv_role="kv_both")
    with pytest.raises(
        ConfigError, match="NixlConnector: vLLM's connectors use KV that was released"
    ) as caught:
        launched.args(role=role, kv_transfer_config=own)
    assert caught.value.fields["key"] == "args.engine_args.kv_transfer_config"
    assert NIXL in caught.value.fields["remedy"]


def test_environment_of_vllm(launched: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    launched()
    assert os.environ["VLLM_NO_USAGE_STATS"] == "0"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert os.environ["VLLM_LOGGING_LEVEL"] in ("DEBUG", "INFO", "WARNING", "ERROR")


def test_tiers_are_a_connector(launched: Launcher) -> None:
    transfer = launched.args(TIERED)["kv_transfer_config"]
    assert (transfer.kv_connector, transfer.kv_role) == (TIERS, "kv_both")
    assert transfer.kv_load_failure_policy == "recompute"
    assert transfer.kv_connector_extra_config["tiers"] == {"host": "2GiB", "disk": "4GiB", "disk_dir": ""}
    assert "Prefill" not in launched(TIERED).info.features


@pytest.mark.parametrize("how", ["role", "own"])
def test_tiers_beside_other_workers(launched: Launcher, how: str) -> None:
    args = {"kv_transfer_config": {"kv_connector": NIXL, "kv_role": "kv_producer"}} if how == "own" else {}
    role = Role.PREFILL if how == "role" else Role.AGGREGATED
    given = launched.args(TIERED, role, **args)
    transfer = given["kv_transfer_config"]
    assert (transfer.kv_connector, transfer.kv_role) == (TIERED_NIXL, "kv_producer")
    assert transfer.kv_load_failure_policy == "recompute"
    nixl, tiers = transfer.kv_connector_extra_config["connectors"]
    assert (nixl["kv_connector"], nixl["kv_role"]) == (NIXL, "kv_producer")
    assert nixl["kv_connector_extra_config"]["kv_lease_duration"] == 30
    assert (tiers["kv_connector"], tiers["kv_role"]) == (TIERS, "kv_both")
    assert given["disable_hybrid_kv_cache_manager"]
    assert "Prefill" in launched(TIERED, role, **args).info.features


def test_no_tiers_beside_a_connector_of_others(launched: Launcher) -> None:
    with pytest.raises(ConfigError, match="kvolt's connector only") as caught:
        launched.args(TIERED, kv_transfer_config={"kv_connector": "LMCacheConnectorV1"})
    assert caught.value.fields["key"] == "args.tiers"


def test_weights_have_an_identity(tmp_path: Path) -> None:
    """By their names, sizes and content, not by where they lie."""

    def made(name: str, **files: bytes) -> str:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / f"{file}.safetensors").write_bytes(content)
        return weights_identity(tmp_path / name)

    one = made("one", a=b"abc", b=b"d")
    assert made("same", a=b"abc", b=b"d") == one
    assert (
        len({one, made("other", a=b"abd", b=b"d"), made("name", a=b"abc", c=b"d"), made("less", a=b"abc")})
        == 4
    )


# --- what it cannot be started with


@pytest.mark.parametrize(
    ("args", "key", "words"),
    [
        ({"model": "x"}, "args.engine_args.model", "must not contain model"),
        ({"max_modell_len": 1}, "args.engine_args.max_modell_len", "no argument 'max_modell_len'"),
        ({"max-model-len": 1}, "args.engine_args.max-model-len", "no argument 'max-model-len'"),
        ({"max_model_len": 0}, "args.engine_args", "must be a positive integer"),
        ({"enable_prefix_caching": False}, "args.engine_args.enable_prefix_caching", "has no prefix cache"),
        (
            {"kv_events_config": {"publisher": "null"}},
            "args.engine_args.kv_events_config",
            "publishes no KV events",
        ),
        ({"kv_events_config": None}, "args.engine_args.kv_events_config", "publishes no KV events"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_setting_that_is_wrong_is_named(
    launched: Launcher, args: dict[str, Any], key: str, words: str
) -> None:
    error = launched.refusal(**args)
    assert error.fields["key"] == key
    assert words in error.message
    assert AsyncLLM.made == [], "nothing was started"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("max_modell_len", "did you mean 'max_model_len'?"),
        ("max-model-len", "did you mean 'max_model_len'?"),
        ("colour", "see `vllm serve --help`, with underscores"),
    ],
)
def test_a_near_name_is_said(launched: Launcher, name: str, remedy: str) -> None:
    assert launched.refusal(**{name: 1}).fields["remedy"] == remedy


@pytest.mark.parametrize(
    "args",
    [
        {"kv_transfer_config": {"kv_connecter": "x"}},
        {"kv_transfer_config": {"kv_connector": "x", "kv_role": "both"}},
        {"kv_events_config": {"colour": "red"}},
    ],
    ids=["name", "value", "events"],
)
def test_a_wrong_setting_within_another(launched: Launcher, args: dict[str, Any]) -> None:
    assert launched.refusal(**args).fields["key"].startswith("args.engine_args")


def test_without_events_nothing_need_be_cached(launched: Launcher) -> None:
    assert launched(VllmArguments(kv_events=False), enable_prefix_caching=False).events == {}


# --- what is used of the package


@pytest.mark.parametrize(
    "missing",
    [
        "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config",
        "vllm.v1.engine.core_client:EngineCoreClient.abort_requests_async",
        "vllm.sampling_params:StructuredOutputsParams",
        "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
    ],
)
def test_what_another_version_lacks_is_named(
    launched: Launcher, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    module, _, path = missing.partition(":")
    owner: Any = sys.modules[module]
    *within, last = path.split(".")
    for name in within:
        owner = getattr(owner, name)
    monkeypatch.delattr(owner, last)
    error = launched.refusal()
    assert error.message == f"vllm 0.32.0 has no {missing}, which the vllm engine uses"


def test_every_symbol_is_one_of_the_stand_in() -> None:
    """Names that only the stand-in would have are found by the tests with the real one."""
    names = set(stand_in.modules())
    assert {symbol.partition(":")[0] for symbol in REQUIREMENT.symbols} <= names


def test_untested_version_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.install(monkeypatch, tmp_path, version="0.33.1")
    with caplog.at_level(logging.WARNING):
        assert check_requirement(REQUIREMENT) == "0.33.1"
    assert "untested version: package=vllm version=0.33.1" in caplog.text


def test_without_vllm_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    spec = EngineSpec(model=make_model(tmp_path / "model"), role=Role.AGGREGATED)
    with pytest.MonkeyPatch.context() as patch:
        for name in stand_in.ENVIRONMENT:
            patch.setenv(name, "x")
        with pytest.raises(ConfigError, match="needs vllm, which is not installed") as caught:
            launch(spec, VllmArguments(), tmp_path, SystemClock())
    assert "pip install" in str(caught.value.fields["remedy"])


# --- arguments


def test_arguments_are_checked() -> None:
    read = msgspec.convert({"engine_args": {"a": {"b": 1}}, "hold_s": 2}, VllmArguments)
    assert (read.engine_args, read.hold_s, read.kv_events) == ({"a": {"b": 1}}, 2.0, True)
    for wrong in ({"max_waiting": 0}, {"hold_s": 0}, {"colour": "red"}, {"loras": {"a": 1}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, VllmArguments)


def test_sockets_have_short_names() -> None:
    with socket_folder() as folder:
        assert len(f"{folder}/kv-events") < 107
        assert AsyncEngineArgs().model == ""
    assert not Path(folder).exists()
