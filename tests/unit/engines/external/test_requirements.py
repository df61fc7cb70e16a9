"""What an adapter needs of a package is named when it is not there; a version that nobody has tried is only told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvolt.core.errors import ConfigError
from kvolt.engines.external.requirements import Requirement, check_requirement, installed_version

SOURCE = """
from dataclasses import dataclass
from typing import NamedTuple
import msgspec

class Engine:
    def run(self): ...

@dataclass
class Options:
    size: int

class Output(msgspec.Struct):
    tokens: list[int]

class Annotated:
    later: int

class Model:
    model_fields = {"temperature": None}
"""
WANTED = Requirement(
    user="the foreign engine",
    distributions=("kvolt-foreign", "kvolt-foreign-cpu"),
    tested=("1.4.", "2.0.1"),
    symbols=(
        "kvolt_foreign",
        "kvolt_foreign.core:Engine",
        "kvolt_foreign.core:Engine.run",
        "kvolt_foreign.core:Options.size",
        "kvolt_foreign.core:Output.tokens",
        "kvolt_foreign.core:Annotated.later",
        "kvolt_foreign.core:Model.temperature",
    ),
    remedy="pip install kvolt-foreign",
)


def install(folder: Path, distribution: str, version: str) -> None:
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for packages, with one that has no version yet."""
    package = tmp_path / "kvolt_foreign"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("kvolt_foreign", "kvolt_foreign.core"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return tmp_path


def refusal(wanted: Requirement) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_requirement(wanted)
    assert caught.value.fields["key"] == "engine"
    return caught.value


def test_a_package_that_is_not_installed(site: Path) -> None:
    error = refusal(WANTED)
    assert error.message == "the foreign engine needs kvolt-foreign, which is not installed"
    assert error.fields["remedy"] == "pip install kvolt-foreign"
    assert installed_version(WANTED.distributions) is None


@pytest.mark.parametrize(
    "version", ["1.4.0", "1.4.9.post1", "1.4.2+cpu", "2.0.1", "2.0.1+cu128", "2.0.1.dev3"]
)
def test_a_tested_version_says_nothing(site: Path, version: str, caplog: pytest.LogCaptureFixture) -> None:
    install(site, "kvolt-foreign", version)
    assert check_requirement(WANTED) == version
    assert not caplog.records


@pytest.mark.parametrize("version", ["1.40.0", "1.5.0", "2.0.10", "2.0"])
def test_untested_version_is_only_logged(site: Path, version: str, caplog: pytest.LogCaptureFixture) -> None:
    install(site, "kvolt-foreign", version)
    assert check_requirement(WANTED) == version
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"untested version: package=kvolt-foreign version={version} tested=1.4.*, 2.0.1"
    )


def test_the_first_distribution_that_is_there_counts(site: Path) -> None:
    install(site, "kvolt-foreign-cpu", "1.4.7")
    assert check_requirement(WANTED) == "1.4.7"
    install(site, "kvolt-foreign", "1.4.8")
    __import__("importlib").invalidate_caches()
    assert check_requirement(WANTED) == "1.4.8"


@pytest.mark.parametrize(
    "symbol",
    [
        "kvolt_foreign.gone",
        "kvolt_foreign.gone:Engine",
        "kvolt_foreign.core:Motor",
        "kvolt_foreign.core:Engine.stop",
        "kvolt_foreign.core:Motor.run",
        "kvolt_foreign.core:Options.length",
        "kvolt_foreign.core:Output.text",
        "kvolt_foreign.core:Model.top_p",
    ],
)
def test_a_missing_symbol_is_named(site: Path, symbol: str) -> None:
    install(site, "kvolt-foreign", "1.5.0")
    error = refusal(replace(WANTED, symbols=(*WANTED.symbols, symbol)))
    assert error.message == f"kvolt-foreign 1.5.0 has no {symbol}, which the foreign engine uses"
    assert error.fields["remedy"] == "tested with 1.4.*, 2.0.1: pip install kvolt-foreign"


def test_requirement_error_names_its_user(site: Path) -> None:
    wanted = replace(WANTED, user="the processor 'foreign'", key="processor")
    with pytest.raises(ConfigError) as caught:
        check_requirement(wanted)
    assert caught.value.message == "the processor 'foreign' needs kvolt-foreign, which is not installed"
    assert caught.value.fields["key"] == "processor"


def test_all_that_is_missing_is_named_at_once(site: Path) -> None:
    install(site, "kvolt-foreign", "1.4.0")
    missing = ("kvolt_foreign.core:Motor", "kvolt_foreign.core:Engine.stop")
    error = refusal(replace(WANTED, symbols=(missing[0], *WANTED.symbols, missing[1])))
    assert f"has no {missing[0]}, {missing[1]}, which" in error.message
