"""Names of models, and which files of a folder or repository serve one."""

from __future__ import annotations

import pytest

from kvolt.core.errors import ConfigError
from kvolt.models.model_files import (
    HubName,
    ModelFiles,
    ModelKind,
    choose_files,
    is_pickle,
    parse_hub_name,
    quantization,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("a/b@main", HubName("a/b", "main")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("a/b:Q4_K_M", HubName("a/b", None, "Q4_K_M")),
        ("a/b@v1:x/y.gguf", HubName("a/b", "v1", "x/y.gguf")),
        ("a/b:y.gguf@v1", HubName("a/b", "v1", "y.gguf")),
        ("a", None),
        ("a/b/c", None),
        ("a/b@", None),
        ("a/b:", None),
        ("a/b@x:y@z", None),
        ("a b/c", None),
        ("-a/b", None),
        ("a/b\n", None),
        ("../b", None),
        ("é/b", None),
    ],
)
def test_hub_names(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name


def test_a_name_is_written_as_it_is_read() -> None:
    for text in ("a/b", "a/b@v1", "a/b:Q8_0", "a/b@v1:x.gguf"):
        assert str(parse_hub_name(text)) == text


def folder(*files: str) -> ModelFiles:
    return ModelFiles(ModelKind.FOLDER, files)


def test_a_folder_is_its_small_files_and_its_weights() -> None:
    names = [
        "config.json",
        "README.md",
        "model.safetensors",
        "pytorch_model.bin",
        "tokenizer.json",
        "x/model.safetensors",
    ]
    assert choose_files(names, None, "m") == folder("config.json", "tokenizer.json", "model.safetensors")


def test_weights_that_are_there_twice_are_taken_once() -> None:
    assert choose_files(
        ["config.json", "consolidated.safetensors", "model.safetensors"], None, "m"
    ) == folder("config.json", "model.safetensors")
    assert choose_files(["config.json", "consolidated.safetensors"], None, "m") == folder(
        "config.json", "consolidated.safetensors"
    )


def test_safetensors_go_before_a_gguf_and_a_gguf_before_pickles() -> None:
    both = ["config.json", "model.safetensors", "m-Q4_0.gguf"]
    assert choose_files(both, None, "m").kind is ModelKind.FOLDER
    assert choose_files(both, "Q4_0", "m") == ModelFiles(ModelKind.GGUF, ("m-Q4_0.gguf",))
    assert choose_files(["config.json", "m.bin", "m.gguf"], None, "m") == ModelFiles(
        ModelKind.GGUF, ("m.gguf",)
    )


@pytest.mark.parametrize(
    ("names", "wanted", "reason"),
    [
        ([], None, "no_weights"),
        (["config.json"], None, "no_weights"),
        (["model.safetensors"], None, "no_weights"),
        (["config.json", "adapter_model.safetensors"], None, "no_weights"),
        (["config.json", "pytorch_model.bin", "training_args.bin"], None, "pickle"),
        (["config.json", "model.safetensors"], "pytorch_model.bin", "pickle"),
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], None, "ambiguous"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "ambiguous"),
        (["a-Q4_0.gguf"], "Q4", "not_found"),
        (["a-Q4_0.gguf"], "b.gguf", "not_found"),
        (["model.safetensors"], "Q4_0", "not_found"),
        (["a-Q4_0-00001-of-00002.gguf", "a-Q4_0-00002-of-00002.gguf"], None, "split"),
        (["a-Q4_0-00001-of-00002.gguf"], "Q4_0", "split"),
    ],
)
def test_what_cannot_be_chosen(names: list[str], wanted: str | None, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_files(names, wanted, "owner/model")
    assert caught.value.fields["reason"] == reason
    assert caught.value.fields["key"] == "model"
    assert caught.value.fields["remedy"]
    assert caught.value.message.startswith("owner/model")


def test_a_long_list_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_files([f"a-Q{index}_0.gguf" for index in range(20)], None, "owner/model:")
    assert str(caught.value.fields["remedy"]).endswith(", and 8 more")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "q4_k_m"),
        ("x/Llama-3.2-1B-IQ4_XS.gguf", "IQ4_XS"),
        ("model-BF16.gguf", "BF16"),
        ("model.gguf", None),
        ("Qwen3-8B.gguf", None),
    ],
)
def test_quantization_by_name(name: str, expected: str | None) -> None:
    assert quantization(name) == expected


def test_pickles_by_name() -> None:
    assert is_pickle("a/Model.BIN")
    assert is_pickle("model.pt")
    assert not is_pickle("model.safetensors")
