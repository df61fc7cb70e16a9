"""`kvolt model`: what it lists, shows and fetches, on a terminal and elsewhere."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.models.hub_lab import FakeHub, Repo
from tests.unit.models.package_lab import DATA, WEIGHTS

from kvolt.cli.main import main
from kvolt.models import resolve
from kvolt.models.hub import ModelHub
from kvolt.testing.tiny_models import tiny_config, tiny_gguf

pytest.importorskip("huggingface_hub")

GENERATION = {"eos_token_id": 2, "temperature": 0.6, "max_new_tokens": 512}
CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "max_position_embeddings": 512}
REPO = Repo(
    {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": json.dumps(GENERATION).encode(),
        "model.safetensors": b"x" * 5000,
        "tokenizer.json": b"{}",
    }
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The only hub, an empty cache, and a built-in model that is not here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(resolve.BUILT_IN, resolve.DEFAULT_MODEL, WEIGHTS)
    with FakeHub({"kvolt/tiny": REPO, "kvolt/gguf": Repo({"a-Q8_0.gguf": b"eight"})}) as server:
        own = resolve.Sources(tmp_path / "home", ModelHub(server.url, tmp_path / "hub"))
        monkeypatch.setattr(resolve, "Sources", lambda: own)
        yield server


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_fetch_then_show_then_list(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", "kvolt/tiny"]) == 0
    out, err = capsys.readouterr()
    path = Path(out.strip())
    assert (path / "model.safetensors").read_bytes() == b"x" * 5000
    assert f"fetching kvolt/tiny from {hub.url} (5.16 kB)" in err
    assert "fetched kvolt/tiny" in err
    assert main(["model", "fetch", "kvolt/gguf:Q8_0"]) == 0
    capsys.readouterr()

    assert main(["model", "show", "kvolt/tiny"]) == 0
    shown = capsys.readouterr().out
    lines = dict(line.split(None, 1) for line in shown.splitlines())
    assert lines["path"] == str(path)
    assert lines["from"] == "hub cache"
    assert lines["revision"] == REPO.commit
    assert lines["architecture"] == "LlamaForCausalLM"
    assert lines["context"] == "512"
    assert lines["defaults"] == "max_tokens 512, temperature 0.6"
    assert "5 kB  model.safetensors" in shown

    assert main(["model", "show", "kvolt/gguf:Q8_0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["files"]) == ("gguf", {"a-Q8_0.gguf": 5})

    assert main(["model", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {"smollm2-135m", "kvolt/tiny", "kvolt/gguf:a-Q8_0.gguf"}
    assert rows["kvolt/tiny"]["path"] == str(path)
    assert rows["smollm2-135m"]["path"] is None


def test_list_says_how_to_get_what_is_not_here(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "list"]) == 0
    assert "not downloaded: `kvolt model fetch smollm2-135m`" in capsys.readouterr().out
    place = tmp_path / "home" / "models"
    place.mkdir(parents=True)
    (place / WEIGHTS.file).write_bytes(DATA)
    assert main(["model", "list"]) == 0
    assert f"smollm2-135m  gguf     10.2 kB  {place / WEIGHTS.file}" in capsys.readouterr().out


def test_half_a_model_is_not_listed(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", "kvolt/tiny"]) == 0
    (Path(capsys.readouterr().out.strip()) / "model.safetensors").unlink()
    assert main(["model", "list"]) == 0
    assert "kvolt/tiny" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["show", "kvolt/tiny"], 2, "kvolt/tiny is not on this machine (`kvolt model fetch kvolt/tiny`)"),
        (["show", "./gone"], 2, "./gone does not exist"),
        (["fetch", "kvolt/none"], 2, "has no model kvolt/none"),
        (["fetch", "smollm"], 2, "unknown model 'smollm'"),
        (["fetch"], 2, "NAME"),
        (["get", "x"], 2, "unknown choice get"),
        ([], 2, "list|fetch|show"),
    ],
)
def test_errors_are_one_line(
    argv: list[str], code: int, says: str, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", *argv]) == code
    err = capsys.readouterr().err
    assert err.startswith("kvolt: ")
    assert err.count("\n") == 1
    assert says in err


def test_a_broken_config_is_no_obstacle(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "kvolt.toml").write_text("broken")
    assert main(["model", "list"]) == 0


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"architectures": [1, {}], "hidden_size": {"a": 1}}, "architecture  1, {}"),
        ({"architectures": ["\x1b[2Jcleared"]}, "\\x1b[2Jcleared"),
        ("[" * 100_000, "size "),
        (tiny_config("LlamaForCausalLM", no_rope_layers=5), "refuses it: "),
    ],
)
def test_a_hostile_config_is_shown_as_plain_text(
    config: object, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert main(["model", "show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert shown in out
    assert "\x1b" not in out


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_model_that_serve_refuses_is_shown_with_the_reason(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the message of `kvolt serve`, from the same check."""
    path, field = tmp_path, "final_logit_softcapping"
    if kind == "gguf":
        path = tiny_gguf(tmp_path / "model.gguf", metadata={f"llama.{field}": 30.0})
    else:
        (path / "config.json").write_text(json.dumps(tiny_config("LlamaForCausalLM", **{field: 30.0})))
        (path / "model.safetensors").write_bytes(b"x")
    assert main(["model", "show", str(path)]) == 0
    [line] = [each for each in capsys.readouterr().out.splitlines() if each.startswith("kvolt serve")]
    assert f"{field} = 30.0" in line
    assert "--engine vllm" in line
    assert main(["model", "show", str(path), "--json"]) == 0
    assert field in json.loads(capsys.readouterr().out)["refused"]


def test_a_bar_on_a_terminal(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["model", "fetch", "kvolt/tiny"]) == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()).is_dir()
    assert "fetching kvolt/tiny from" in err
    assert "━━━━" in err
    assert "INFO" not in err


def test_a_simulated_model_has_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "show", "sim-tiny"]) == 0
    assert "simulated: no files; `kvolt serve sim-tiny` serves it" in capsys.readouterr().out
    assert main(["model", "show", "sim-tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "sim-tiny", "kind": "simulated", "files": {}}
