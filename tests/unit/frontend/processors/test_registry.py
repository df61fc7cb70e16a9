"""Which processor there is by a name, and what is told where there is none."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from tests.unit.frontend.processors import vllm_stand_in

from kvolt.core.errors import ConfigError
from kvolt.engines.external import requirements
from kvolt.frontend.processors import registry, vllm_symbols
from kvolt.frontend.processors.registry import GROUP, ProcessorKind, find_processor, processor_names
from kvolt.frontend.processors.vllm_processor import VllmProcessor
from kvolt.frontend.tokenization.preprocess import CardProcessor, ParserNames
from kvolt.runtime.config.settings import FrontendSettings

NONE = ParserNames(None, None)
OFFERED = ProcessorKind(CardProcessor)


def offer(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """As an installed package would, under the name `own`."""
    point = EntryPoint("own", value, GROUP)

    def found(*, group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "kvolt.processors"
        return [point] if name in (None, "own") else []

    monkeypatch.setattr(registry, "entry_points", found)


def test_ours_is_the_default() -> None:
    kind = find_processor(FrontendSettings().processor)
    assert kind.build is CardProcessor
    kind.check(NONE)
    with pytest.raises(ConfigError, match="hermis"):
        kind.check(ParserNames("hermis", None))


def test_an_unknown_name_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, f"{__name__}:OFFERED")
    with pytest.raises(ConfigError, match="unknown processor 'vlm'") as caught:
        find_processor("vlm")
    assert caught.value.fields == {"key": "processor", "remedy": "known processors: card, own, vllm"}
    assert processor_names() == ["card", "own", "vllm"]


def test_one_that_a_package_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, f"{__name__}:OFFERED")
    kind = find_processor("own")
    assert kind.build is CardProcessor
    kind.check(ParserNames("anything", None))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (f"{__name__}:NONE", "is not a ProcessorKind"),
        (f"{__name__}:nothing", "cannot be loaded"),
        ("no_such_module:KIND", "cannot be loaded"),
    ],
)
def test_one_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, value: str, told: str) -> None:
    offer(monkeypatch, value)
    with pytest.raises(ConfigError, match=told):
        find_processor("own")


def test_without_vllm_the_error_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "installed_version", lambda names: None)
    kind = find_processor("vllm")
    assert kind.build is VllmProcessor
    with pytest.raises(ConfigError, match="processor 'vllm' needs vllm, which is not installed") as caught:
        kind.check(NONE)
    assert caught.value.fields["key"] == "processor"
    assert "pip install 'kvolt[vllm]'" in caught.value.fields["remedy"]


@pytest.mark.parametrize(
    "missing",
    ["vllm.parser.parser_manager:ParserManager", "vllm.renderers.hf:safe_apply_chat_template"],
)
def test_another_vllm_fails_at_the_start_with_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    vllm_stand_in.install(monkeypatch, tmp_path, without=missing)
    with pytest.raises(ConfigError, match=missing) as caught:
        find_processor("vllm").check(NONE)
    assert caught.value.fields["key"] == "processor"
    assert "0.32." in caught.value.fields["remedy"]


@pytest.mark.parametrize(
    ("names", "told", "key"),
    [
        (
            ParserNames("hermis", None),
            "no tool parser 'hermis'; known: granite-20b-fc, hermes",
            "tool_parser",
        ),
        (ParserNames(None, "r1"), "no reasoning parser 'r1'; known: deepseek_r1, unfit", "reasoning_parser"),
    ],
)
def test_a_parser_that_vllm_does_not_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: ParserNames, told: str, key: str
) -> None:
    vllm_stand_in.install(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=told) as caught:
        find_processor("vllm").check(names)
    assert caught.value.fields["key"] == key


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (("granite_20b_FC", "deepseek-r1"), ("granite-20b-fc", "deepseek_r1")),
        (("none", None), (None, None)),
    ],
)
def test_dashes_and_underscores_are_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: Any, known: Any
) -> None:
    vllm_stand_in.install(monkeypatch, tmp_path)
    find_processor("vllm").check(ParserNames(*given))
    assert vllm_symbols.known_names(ParserNames(*given)) == known
