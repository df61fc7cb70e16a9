"""The command that runs any engine through the suite: what it says of a good one, a bad one, a plain one."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
from msgspec.structs import replace
from tests.unit.testing.toy_engine import ToyArguments, ToyEngine

from kvolt.core.card import EngineInfo
from kvolt.core.errors import ConfigError
from kvolt.core.request import Request
from kvolt.engines import registry
from kvolt.engines.registry import EngineKind
from kvolt.testing.engines.check import main


class BadArguments(ToyArguments, frozen=True):
    fault: str = ""


class BadEngine(ToyEngine):
    """With a fault that is asked for."""

    def __init__(self, spec: registry.EngineSpec, arguments: BadArguments) -> None:
        super().__init__(spec, arguments)
        self._fault = arguments.fault

    async def start(self) -> EngineInfo:
        if self._fault == "start":
            raise ConfigError("no such weights", key="model", remedy="look for them")
        info = await super().start()
        return replace(info, features=("KvEvents",)) if self._fault == "shy" else info

    def submit(self, request: Request) -> None:
        if self._fault == "choices" and request.sampling.num_choices > 2:
            raise ZeroDivisionError("by\nzero")
        super().submit(request)

    async def clear_kv(self) -> int:
        return await super().clear_kv() + (1 if self._fault == "counts" else 0)

    def _load(self, plan: list) -> object:
        load = super()._load(plan)
        return replace(load, kv_used_blocks=1) if self._fault == "leaks" else load


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kvolt_test_engines")
    vars(module).update(
        TOY=EngineKind(ToyArguments, ToyEngine, "toy"), BAD=EngineKind(BadArguments, BadEngine, "bad")
    )
    monkeypatch.setitem(sys.modules, "kvolt_test_engines", module)
    points = [
        EntryPoint(name, f"kvolt_test_engines:{name.upper()}", registry.GROUP) for name in ("toy", "bad")
    ]
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda *, group, name=None: [point for point in points if name in (None, point.name)],
    )


def lines(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[str]:
    assert main(argv) == code
    return capsys.readouterr().out.splitlines()


def test_an_engine_that_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    """All tiers, on a real loop, with a prompt for the EOS cases that the command found by itself."""
    told = lines(capsys, "toy", "--arg", "expiry_s=0.2")
    assert told[0] == "offers KvEvents, KvVisible, KvMovable, KvAddressable, KvTierable, Prefill"
    assert told[-1].endswith(", 0 FAILED, 0 not run, 0 not offered")
    verdicts = {tuple(line[:23].split()) for line in told[1:-1]}
    tiers = ("core", "events", "kv-visible", "handoff", "kv-placed", "kv-tiers")
    assert verdicts == {(tier, "ok") for tier in tiers}


@pytest.mark.parametrize(
    ("fault", "only", "says"),
    [
        ("leaks", "abort_frees", "running, waiting, blocks in use: (0, 0, 1) (harness.py:"),
        ("choices", "every_choice", "every_choice_ends: ZeroDivisionError: by zero (test_check.py:"),
        (
            "counts",
            "clear_removes_all_blocks",
            "assert await kv_events(run).clear_kv() == num_blocks (event_cases.py:",
        ),
    ],
)
def test_a_failure_says_what_and_where(
    capsys: pytest.CaptureFixture[str], fault: str, only: str, says: str
) -> None:
    told = lines(capsys, "bad", "--arg", f"fault={fault}", "--only", only, code=1)
    assert len(told) == 3
    assert "FAILED" in told[1]
    assert says in told[1]
    assert told[-1] == "0 ok, 1 FAILED, 0 not run, 0 not offered"


def test_what_is_not_offered_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Though the class has the methods: the engine's own word counts."""
    told = lines(
        capsys, "bad", "--arg", "fault=shy", "--only", "match_counts", "--only", "copied_blocks_are_used"
    )
    assert told == [
        "offers KvEvents",
        "kv-visible not offered match_counts_held_blocks: needs KvVisible",
        "kv-placed  not offered copied_blocks_are_used: needs Prefill, KvAddressable",
        "0 ok, 0 FAILED, 0 not run, 2 not offered",
    ]


def test_what_cannot_be_shown_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    told = lines(capsys, "toy", "--arg", "kv_blocks=100000", "--only", "evicted_blocks")
    assert told[1] == (
        "events     not run     evicted_blocks_are_not_found: "
        "a pool of 100000 blocks is too large to be filled by a test"
    )
    quick = ("--arg", "speed=100", "--only", "core/ends_at_eos")
    told = lines(capsys, "sim", *quick)
    assert "not run     ends_at_eos: no prompt with a short answer is known" in told[1]
    asked = "<say> good day<or/> good night now</say>"
    told = lines(capsys, "sim", *quick, "--arg", "answer_from_prompt=true", "--ending-prompt", asked)
    assert told[1].startswith("core       ok          ends_at_eos: ")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("nobody",), 2, "kvolt: unknown engine 'nobody' (known engines: "),
        (("toy", "--arg", "kv_blokcs=1"), 2, "(did you mean 'kv_blocks'?)"),
        (("toy", "--arg", "kv_blocks"), 2, "is not KEY=VALUE"),
        (("bad", "--arg", "fault=start"), 2, "kvolt: no such weights (look for them)\n"),
        (("sim", "--arg", "speed=100", "--ending-prompt", "x"), 2, "do not both end by EOS"),
    ],
)
def test_a_wrong_command_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], code: int, says: str
) -> None:
    assert main(argv) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert says in told.err
    assert told.err.count("\n") == 1


def test_an_engine_without_a_model_of_its_own_wants_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["kvolt_test_engines"], "TOY", EngineKind(ToyArguments, ToyEngine))
    assert main(["toy"]) == 2
    assert "set --model" in capsys.readouterr().err
    assert lines(capsys, "toy", "--model", "m", "--only", "info_agrees")[-1].startswith("1 ok")
