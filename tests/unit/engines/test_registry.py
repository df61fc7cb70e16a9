"""Engines by name: built in, from a package, and the ways to get it wrong."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines import registry
from kvolt.engines.contract import EngineSpec
from kvolt.engines.registry import EngineKind, build_engine, check_arguments, engine_names, find_engine
from kvolt.engines.sim.engine import SimArguments, SimEngine

SPEC = EngineSpec(model="m", role=Role.AGGREGATED)


class PluginArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int = 3


class PluginEngine(SimEngine):
    def __init__(self, spec: EngineSpec, arguments: PluginArguments) -> None:
        super().__init__(spec, SimArguments(block_size=arguments.size))


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kvolt_test_plugin")
    module.KIND = EngineKind(PluginArguments, PluginEngine)  # type: ignore[attr-defined]
    module.NOT_A_KIND = PluginEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvolt_test_plugin", module)
    points = [
        EntryPoint("plugin", "kvolt_test_plugin:KIND", registry.GROUP),
        EntryPoint("wrong", "kvolt_test_plugin:NOT_A_KIND", registry.GROUP),
        EntryPoint("renamed", "kvolt_test_plugin:GONE", registry.GROUP),
        EntryPoint("missing", "kvolt_no_such_module:KIND", registry.GROUP),
    ]

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [point for point in points if point.group == group and name in (None, point.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)


def refused(name: str, arguments: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_arguments(name, arguments)
    return caught.value


async def test_sim_is_built_with_its_arguments() -> None:
    engine = build_engine("sim", SPEC, {"block_size": 32, "latency": {"base_s": 0.5}})
    assert isinstance(engine, SimEngine)
    assert engine.card.block_size == 32
    assert (await engine.start()).model == "m"


def test_every_argument_has_a_default() -> None:
    assert check_arguments("sim", {}) == SimArguments()


def test_an_unknown_engine_names_the_known_ones(plugins: None) -> None:
    with pytest.raises(ConfigError) as caught:
        find_engine("vlmm")
    assert caught.value.fields["key"] == "engine"
    assert caught.value.fields["remedy"] == (
        "known engines: missing, native, plugin, remote, renamed, sglang, sim, trtllm, vllm, wrong, FILE.py:NAME"
    )


def test_an_unknown_argument_names_the_nearest() -> None:
    error = refused("sim", {"block_sise": 16})
    assert error.fields == {"key": "args.block_sise", "remedy": "did you mean 'block_size'?"}


def test_an_argument_like_no_other_lists_them_all() -> None:
    remedy = str(refused("sim", {"zzz": 1}).fields["remedy"])
    assert remedy.startswith("known: speed, slow_by, block_size")


@pytest.mark.parametrize(
    "arguments",
    [
        {"block_size": 0},
        {"block_size": "16"},
        {"speed": 0},
        {"latency": {"base_s": "slow"}},
        {"preset": "h100-lama"},
        {"preset": None},
        {"scheduling": "trtllm"},
        {"kv_blocks": None},
        {"answer_text": 42},
        {"answer_text": "\udcff"},
        {"answer_from_prompt": "yes"},
        {"eos_token": "</s>"},
        {"bos_token": "<s>"},
        {"model_tokenizer": "tokenizer.json"},
    ],
)
def test_a_wrong_value_is_a_config_error(arguments: dict[str, Any]) -> None:
    error = refused("sim", arguments)
    assert error.fields["key"] == "args"
    assert error.message.startswith("engine 'sim': ")


async def test_a_package_can_bring_an_engine(plugins: None) -> None:
    assert "plugin" in engine_names()
    engine = build_engine("plugin", SPEC, {"size": 7})
    assert isinstance(engine, PluginEngine)
    assert engine.card.block_size == 7
    assert refused("plugin", {"sise": 7}).fields["remedy"] == "did you mean 'size'?"


@pytest.mark.parametrize(
    ("name", "says"),
    [("wrong", "not an EngineKind"), ("renamed", "cannot be loaded"), ("missing", "cannot be loaded")],
)
def test_a_broken_package_is_a_config_error(plugins: None, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_engine(name)


FILE_ENGINE = """
from __future__ import annotations
import msgspec
from kvolt.engines.registry import EngineKind
from kvolt.engines.sim.engine import SimArguments, SimEngine

class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int = 3

KIND = EngineKind(Arguments, lambda spec, arguments: SimEngine(spec, SimArguments(block_size=arguments.size)))
"""


def test_a_file_can_have_an_engine(tmp_path: Path) -> None:
    file = tmp_path / "engine.py"
    file.write_text(FILE_ENGINE)
    name = f"{file}:KIND"
    assert build_engine(name, SPEC, {"size": 7}).card.block_size == 7
    assert find_engine(name) is find_engine(name), "loaded once: its classes stay the same"
    assert refused(name, {"sise": 7}).fields["remedy"] == "did you mean 'size'?"


@pytest.mark.parametrize(
    ("text", "says", "remedy"),
    [
        (None, "No such file", "correct the file"),
        ("KIND = 1 / 0", "ZeroDivisionError: division by zero", "correct the file"),
        ("import kvolt_no_such_module", "No module named 'kvolt_no_such_module'", "install its dependencies"),
        ("", "no attribute 'KIND'", "correct its name"),
        ("KIND = 1", "KIND is not an EngineKind", None),
    ],
)
def test_a_broken_file_is_a_config_error(
    tmp_path: Path, text: str | None, says: str, remedy: str | None
) -> None:
    file = tmp_path / "engine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        find_engine(f"{file}:KIND")
    assert caught.value.fields.get("remedy") == remedy


def test_a_package_does_not_take_a_built_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("sim", "kvolt_no_such_module:KIND", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **kind: [point])
    assert find_engine("sim").build is SimEngine


def test_a_mistyped_name_inside_a_nested_argument_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        check_arguments("sim", {"latency": {"bas_s": 1}})
    assert caught.value.fields["key"] == "args.latency.bas_s"
    assert "base_s" in str(caught.value.fields["remedy"])
