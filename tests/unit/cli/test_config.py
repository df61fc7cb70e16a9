"""`kvolt config`: what it prints, and that it helps when the config is broken."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvolt.cli.main import main
from kvolt.runtime.config.leaves import leaves


@pytest.fixture(autouse=True)
def _clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[list[str]]:
    assert main(["config", *argv]) == 0
    return [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]


def test_show_gives_value_and_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOLT_FRONTEND_HOST", "0.0.0.0")
    rows = printed(capsys, "show", "--port", "9")
    assert rows[0] == ["key", "value", "origin"]
    assert ["frontend.port", "9", "flag --port"] in rows
    assert ["frontend.host", "0.0.0.0", "env KVOLT_FRONTEND_HOST"] in rows
    assert ["workers.0.count", "1", "default"] in rows
    assert {row[0] for row in rows} >= set(leaves())


def test_show_takes_a_key_or_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "show", "frontend.port")[1:] == [["frontend.port", "8000", "default"]]
    assert [row[0] for row in printed(capsys, "show", "log")[1:]] == ["log.level", "log.format"]


def test_show_hides_a_join_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOLT_CLUSTER_JOIN_TOKEN", "kvolt-join-abc")
    rows = printed(capsys, "show", "cluster.join_token")
    assert rows[1] == ["cluster.join_token", "(secret)", "env KVOLT_CLUSTER_JOIN_TOKEN"]


def test_show_of_an_unknown_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "fronted.port"]) == 2
    assert "unknown key fronted.port; did you mean frontend.port?" in capsys.readouterr().err


def test_show_toml_can_be_loaded_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "show", "--toml", "--port", "9"]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text)["frontend"]["port"] == 9
    (tmp_path / "again.toml").write_text(text)
    assert main(["config", "show", "--toml", "--config", "again.toml"]) == 0
    assert capsys.readouterr().out == text


def test_describe_documents_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "describe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line for line in lines if line and not line.startswith((" ", "["))}
    assert names >= {*leaves(), "workers.count", "workers.tiers.host"}


def test_describe_keeps_flags_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "describe"]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.endswith("-")]


def test_describe_takes_a_section_or_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "describe", "log"]) == 0
    assert capsys.readouterr().out.startswith("[log]  Logging.\n\nlog.level\n    Minimum log level")
    assert main(["config", "describe", "router.queue"]) == 0
    text = capsys.readouterr().out
    assert "true or false; default: true; env: KVOLT_ROUTER_QUEUE" in text
    assert main(["config", "describe", "rooter"]) == 2
    assert "unknown section rooter; did you mean router?" in capsys.readouterr().err


def test_check_lists_every_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("zzzz = 1\n[frontend]\nport = -1\n")
    assert main(["config", "check", "bad.toml"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["bad.toml:zzzz", "bad.toml:frontend.port"]


def test_check_knows_the_engines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(
        "zzzz = 1\n"
        "[[workers]]\nname = 'a'\nmodel = 'sim-a'\nargs = {spee = 1}\n"
        "[[workers]]\nname = 'b'\nengine = 'vlm'\n"
        "[[workers]]\nname = 'c'\nengine = 'sim'\nargs = {speed = 0}\n"
        "[[workers]]\nname = 'd'\nmodel = 'sim-d'\nargs = {speed = 2}\n"
    )
    assert main(["config", "check", "bad.toml"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "bad.toml:zzzz",
        "bad.toml:workers.0.args.spee",
        "bad.toml:workers.1.engine",
        "bad.toml:workers.2.args",
    ]
    assert lines[1].endswith("(did you mean 'speed'?)")


def test_check_and_env_work_beside_a_broken_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "kvolt.toml").write_text("broken")
    (tmp_path / "good.toml").write_text("namespace = 'n'\n")
    assert main(["config", "check", "good.toml"]) == 0
    assert capsys.readouterr().out == "good.toml: ok\n"
    names = [row[0] for row in printed(capsys, "env")[1:]]
    assert names == [leaf.env for leaf in leaves().values()]
    assert main(["config", "show"]) == 2


def test_show_fits_120_columns_and_has_a_row_for_each_setting_of_a_tier(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run")  # a short path
    assert main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert any(line.startswith("workers.0.tiers.disk_touches ") for line in lines)
    assert main(["config", "show", "workers.0.tiers.eviction"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["workers.0.tiers.eviction", "lru", "default"]
