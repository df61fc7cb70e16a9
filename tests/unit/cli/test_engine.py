"""`kvolt engine`: what it lists, and how it hands over to the suite."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from kvolt.cli import engine as engine_verb
from kvolt.cli.engine import field_docs
from kvolt.cli.main import main
from kvolt.engines import registry
from kvolt.engines.registry import EngineKind
from kvolt.engines.sim.engine import SimArguments
from kvolt.latency.presets import PRESETS


class PluginArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plugin's. It has few."""

    size: int = 3
    """How large
    it is. And more about it."""
    plain: list[int] = []
    told: Annotated[str | None, Meta(description="Told by its type.")] = None
    must: int


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kvolt_cli_plugin")
    vars(module).update(KIND=EngineKind(PluginArguments, lambda spec, arguments: None, "m"))  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(sys.modules, "kvolt_cli_plugin", module)
    points = [
        EntryPoint("plugin", "kvolt_cli_plugin:KIND", registry.GROUP),
        EntryPoint("broken", "kvolt_no_such_module:KIND", registry.GROUP),
    ]

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [point for point in points if point.group == group and name in (None, point.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(engine_verb, "entry_points", entry_points)


def test_the_list_has_every_engine_with_its_arguments(
    plugins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "list"]) == 0
    told = capsys.readouterr().out
    assert "broken: engine 'broken' cannot be loaded: No module named 'kvolt_no_such_module'" in told
    plugin = told[told.index("plugin (") : told.index("remote:")].splitlines()
    assert plugin == [
        "plugin (kvolt_cli_plugin:KIND): A plugin's. It has few.",
        "  default model: m",
        "  size   3         How large it is",
        "  plain  []",
        "  told   null      Told by its type",
        "  must   required",
        "",
    ]
    sim = told[told.index("sim:") :]
    assert all(f"\n  {name} " in sim for name in SimArguments.__struct_fields__)


def test_one_engine_or_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "list", "sim"]) == 0
    assert capsys.readouterr().out.startswith("sim: ")
    assert main(["engine", "list", "simm"]) == 2
    assert "unknown engine 'simm' (known engines: " in capsys.readouterr().err


def test_the_words_that_an_argument_knows_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "list", "sim"]) == 0
    told = capsys.readouterr().out
    words = told[told.index("  values of preset:\n") :].splitlines()[1:]
    assert [line.split()[0] for line in words] == list(PRESETS)
    assert "fitted to benchmarks/engine/results/gpu_steps.jsonl" in told


def test_docs_come_from_source_or_type() -> None:
    assert field_docs(PluginArguments) == {"size": "How large it is", "told": "Told by its type"}
    made: Any = msgspec.defstruct("Made", [("size", int, 1)])
    assert field_docs(made) == {}, "without a source there is nothing to read"


def test_a_check_is_another_process_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(engine_verb.subprocess, "run", run)
    given = ["--model", "m", "--arg", "a=1", "--arg", "b=-2", "--only", "core", "--timeout", "3"]
    assert main(["engine", "check", "sim", *given]) == 1
    head = [sys.executable, "-m", "kvolt.testing.engines.check", "sim"]
    assert seen == [[*head, "--model=m", "--timeout=3.0", "--arg=a=1", "--arg=b=-2", "--only=core"]]
    assert main(["engine", "check", "nobody"]) == 2
    assert len(seen) == 1, "a wrong name is found before"


def test_a_check_from_end_to_end() -> None:
    command = [sys.executable, "-m", "kvolt", "engine", "check", "sim", "--arg", "speed=50", "--only", "info"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "1 ok, 0 FAILED, 0 not run, 0 not offered"
