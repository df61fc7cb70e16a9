"""`--served-model-name` and `--generation-config`: what a worker registers, and values that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvolt.cli.worker.command import with_model
from kvolt.cli.worker.served_model import served_model, with_served_model
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.settings import WorkerSettings

BUILT_IN = {"temperature": 0.2, "top_p": 0.9}


def group(**fields: Any) -> WorkerSettings:
    return WorkerSettings(**fields)


@pytest.mark.parametrize(
    "model", ["smollm2-135m", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_the_built_in_model_has_its_publishers_defaults(model: str) -> None:
    served = served_model(group(model=model))
    assert (served.names, served.generation_defaults) == ((), BUILT_IN)


def test_other_models_keep_those_of_their_files() -> None:
    assert served_model(group(model="Qwen/Qwen3-0.6B")).generation_defaults is None
    # The model of a group with an attached server is a default that says nothing about the server.
    assert served_model(group(engine="remote")).generation_defaults is None


def test_none_and_a_folder_replace_them(tmp_path: Path) -> None:
    assert served_model(group(generation_config="none")).generation_defaults == {}
    values = {"temperature": 0.5, "max_new_tokens": 64, "eos_token_id": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    served = served_model(group(generation_config=str(tmp_path)))
    assert served.generation_defaults == {"temperature": 0.5, "max_tokens": 64}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "has no generation_config.json"),
        ("{", "cannot be used"),
        ('{"x": ' + "[" * 100_000, "cannot be used"),
        ('{"temperature": 1e308}', "temperature"),
    ],
)
def test_a_folder_without_a_usable_file_is_refused(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        served_model(group(generation_config=str(tmp_path)))


def test_a_gguf_file_is_named_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "Tiny-Model.Q4_K_M.GGUF"
    path.touch()
    assert served_model(group(model=str(path))).names == ("Tiny-Model.Q4_K_M",)
    assert served_model(group(model=str(path), served_names=["a", "b", "a"])).names == ("a", "b")
    assert (
        served_model(group(model=str(path), args={"served_name": "a"})).names == ()
    )  # the engine's own name
    assert served_model(group(model="owner/name:file.gguf")).names == ()


def test_the_loaded_name_is_the_model_as_given_unless_a_server_decides() -> None:
    assert served_model(group(model="a/b", served_names=["x"])).loaded_name == "a/b"
    assert served_model(group(model="a/b", engine="remote")).loaded_name is None


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 1025])
def test_names_that_cannot_be_used(name: str) -> None:
    with pytest.raises(ConfigError, match="served model name"):
        served_model(group(served_names=[name]))


def test_flags_replace_the_settings_which_are_those_of_their_model() -> None:
    configured = group(model="a/b", served_names=["x"], generation_config="none")
    assert with_served_model(configured, [], None) == configured
    changed = with_served_model(configured, ["y", "z"], "auto")
    assert (changed.served_names, changed.generation_config) == (["y", "z"], "auto")
    other = with_model(configured, "c/d")
    assert (other.served_names, other.generation_config) == ([], "auto")
    assert with_model(configured, "a/b").served_names == ["x"]
