"""The smoke script over the stand-in: that it runs to its end, and that it can fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.engines.trtllm import stand_in
from tests.unit.engines.trtllm.lab import LLM_ARGS

from kvolt.testing.engines.trtllm_smoke import main


def run(model: str, *more: str, **changed: Any) -> int:
    return main([model, "--arg", f"llm_args={json.dumps({**LLM_ARGS, **changed})}", "--timeout", "5", *more])


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    told = capsys.readouterr().out.splitlines()
    return {line[8:].partition(":")[0]: line[:6].strip() for line in told}


def test_all_but_the_grammar_which_a_hash_cannot_keep(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model) == 1
    told = lines(capsys)
    assert [name for name, verdict in told.items() if verdict == "FAILED"] == ["follows_grammar"]
    assert told["prefill_handoff_works"] == "ok"


def test_it_finds_out_about_seeds(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for seeds, found in (
        ("none", "run again with --arg seeds=kept"),
        ("kept", "run again with --arg seeds=by_position"),
        ("by_position", "seeds=by_position works"),
    ):
        run(model, "--no-handoff", "--arg", f"seeds={seeds}")
        assert found in capsys.readouterr().out


def test_it_can_fail(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "_stored", lambda blocks: {"type": "removed", "block_hashes": []})
    assert run(model, "--no-handoff") == 1
    assert lines(capsys)["events_match_cache"] == "FAILED"


def test_without_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["some/model"]) == 2
    assert "not installed" in capsys.readouterr().err
