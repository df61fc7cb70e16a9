"""A GGUF file as a folder: the same model, written once and atomically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvolt.core.errors import ConfigError
from kvolt.engines.sim.model import CHAT_TEMPLATE, EOS
from kvolt.models import folder_export
from kvolt.models.checkpoint import open_checkpoint
from kvolt.models.config import (
    ARCHITECTURES,
    LinearRope,
    Llama3Rope,
    RopeDivisors,
    YarnRope,
    read_hf_config,
)
from kvolt.models.folder_export import folder_of, hf_config
from kvolt.models.folder_texts import FolderTexts
from kvolt.models.model_files import ModelKind
from kvolt.models.resolve import Resolved, locate
from kvolt.testing.tiny_models import tiny_checkpoint, tiny_config, tiny_gguf


def found(path: Path) -> Resolved:
    resolved = locate(str(path))
    assert resolved is not None
    assert resolved.kind is ModelKind.GGUF
    return resolved


def written(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(each.relative_to(folder)): (each.stat().st_mtime_ns, each.read_bytes())
        for each in sorted(folder.rglob("*"))
        if each.is_file()
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", num_hidden_layers=1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_is_the_same_model(tmp_path: Path, architecture: str, tied: bool) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", architecture, tie_word_embeddings=tied, num_hidden_layers=1)
    file = open_checkpoint(path)
    folder = open_checkpoint(folder_of(found(path), tmp_path / "cache"))
    assert folder.names() == file.names()
    for name in file.names():
        assert torch.equal(folder.tensor(name), file.tensor(name).float()), name
    assert folder.config == file.config
    assert folder.tokenizer_json == file.tokenizer_json
    assert folder.chat_template == file.chat_template == CHAT_TEMPLATE
    assert folder.config.eos_token_ids[0] == EOS


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0"])
def test_what_is_stored_in_less_is_written_in_full(tmp_path: Path, quantization: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quantization=quantization, num_hidden_layers=1)
    file = open_checkpoint(path)
    folder = open_checkpoint(folder_of(found(path), tmp_path / "cache"))
    assert folder.config.torch_dtype == "float32"
    for name in file.names():
        assert folder.tensor(name).dtype == torch.float32
        assert torch.equal(folder.tensor(name), file.tensor(name).float()), name


def test_large_ones_are_written_as_most_compute(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_export, "_EXACT_WEIGHTS", 1000)
    folder = open_checkpoint(folder_of(found(small), tmp_path))
    file = open_checkpoint(small)
    assert folder.config.torch_dtype == "bfloat16"
    for name in file.names():
        assert torch.equal(folder.tensor(name, torch.bfloat16), file.tensor(name).to(torch.bfloat16)), name


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_biases(tmp_path: Path, bias: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", num_hidden_layers=1, **{bias: True})
    file = open_checkpoint(path)
    folder = open_checkpoint(folder_of(found(path), tmp_path / "cache"))
    assert folder.names() == file.names()
    assert folder.config == file.config


def test_several_ends_and_a_beginning(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }
    path = tiny_gguf(tmp_path / "m.gguf", num_hidden_layers=1, metadata=metadata)
    file = open_checkpoint(path)
    folder = open_checkpoint(folder_of(found(path), tmp_path / "cache"))
    assert folder.config.eos_token_ids == file.config.eos_token_ids
    assert EOS in folder.config.eos_token_ids
    assert folder.config.bos_token_id == file.config.bos_token_id


def test_other_engines_texts_are_those_of_the_file(small: Path, tmp_path: Path) -> None:
    """Also for who knows nothing of its architecture."""
    file, folder = open_checkpoint(small), folder_of(found(small), tmp_path)
    texts = FolderTexts(folder)
    assert texts.tokenizer_json == file.tokenizer_json
    assert texts.chat_template == CHAT_TEMPLATE
    assert texts.eos_token_ids(()) == file.config.eos_token_ids
    assert texts.bos_token_id(None) is None
    assert texts.generation_defaults == {}


def test_it_is_written_once(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(found(small), tmp_path)
    assert folder.parent == tmp_path / "folders"
    before = written(tmp_path)
    assert {path.split("/", 2)[2] for path in before} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    monkeypatch.setattr(folder_export, "_write", lambda *_: pytest.fail("written again"))
    assert folder_of(found(small), tmp_path) == folder
    assert written(tmp_path) == before


def test_other_weights_have_another_folder(tmp_path: Path) -> None:
    one = folder_of(found(tiny_gguf(tmp_path / "a/m.gguf", num_hidden_layers=1)), tmp_path)
    other = folder_of(found(tiny_gguf(tmp_path / "b/m.gguf", seed=1, num_hidden_layers=1)), tmp_path)
    assert one != other
    assert one.parent == other.parent


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_hidden_layers=1)
    resolved = locate(str(folder))
    assert resolved is not None
    assert folder_of(resolved, tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_where_nothing_can_be_written(small: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        folder_of(found(small), tmp_path / "cache")
    assert caught.value.fields == {"key": "model", "remedy": "free disk space, or set KVOLT_HOME"}


def test_what_was_begun_does_not_stay(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_export, "_write_json", full)
    with pytest.raises(ConfigError, match="No space left"):
        folder_of(found(small), tmp_path)
    assert written(tmp_path) == {}
    assert list((tmp_path / "folders").iterdir()) == []
    monkeypatch.undo()
    assert folder_of(found(small), tmp_path).is_dir()


def test_another_process_may_be_sooner(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = folder_export._write

    def slow(checkpoint: Any, part: Path) -> None:
        write(checkpoint, part)
        with monkeypatch.context() as other:
            other.setattr(folder_export, "_write", write)
            sooner.append(folder_of(found(small), tmp_path))

    sooner: list[Path] = []
    monkeypatch.setattr(folder_export, "_write", slow)
    folder = folder_of(found(small), tmp_path)
    assert sooner == [folder]
    assert [each.name for each in (tmp_path / "folders").iterdir()] == [folder.name], "no part of it is left"


# --- config.json


ROPES = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, LinearRope),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        Llama3Rope,
    ),
    "yarn": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "attention_factor": 1.2,
            "beta_fast": 30.0,
            "beta_slow": 2.0,
            "original_max_position_embeddings": 512,
        },
        YarnRope,
    ),
}


@pytest.mark.parametrize("name", [None, "llama3", "yarn", "linear"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_config_is_read_back(architecture: str, name: str | None) -> None:
    fields, kind = ROPES[name] if name is not None else (None, type(None))
    config = read_hf_config(json.dumps(tiny_config(architecture, rope_scaling=fields)).encode(), "float32")
    assert isinstance(config.rope_scaling, kind)
    assert read_hf_config(json.dumps(hf_config(config)).encode(), config.torch_dtype) == config


def test_frequencies_of_its_own_cannot_be_said(tmp_path: Path) -> None:
    fields, _ = ROPES["llama3"]
    path = tiny_gguf(tmp_path / "m.gguf", num_hidden_layers=1, rope_scaling=fields)
    assert isinstance(open_checkpoint(path).config.rope_scaling, RopeDivisors)
    with pytest.raises(ConfigError, match="its own frequency divisors") as caught:
        folder_of(found(path), tmp_path / "cache")
    assert caught.value.fields["remedy"] == "use the model's safetensors"
    assert written(tmp_path / "cache") == {}


def test_a_stretched_context_is_not_stretched_again(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = tiny_gguf(tmp_path / "m.gguf", num_hidden_layers=1, metadata=metadata)
    file = open_checkpoint(path)
    assert file.config.context_length == 4 * 2048
    folder = open_checkpoint(folder_of(found(path), tmp_path / "cache"))
    assert folder.config.context_length == file.config.context_length
