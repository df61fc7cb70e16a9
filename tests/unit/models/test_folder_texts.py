"""FolderTexts: tokenizer, template, ends and defaults of any model's folder; a file that is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvolt.core.errors import ConfigError
from kvolt.models.folder_texts import FolderTexts

TOKENIZER = {
    "added_tokens": [
        {"id": 1, "content": "<s>", "special": True},
        {"id": 2, "content": "</s>"},
        {"id": 3, "content": "<end>"},
        {"content": "<no id>"},
    ],
    "model": {"type": "BPE"},
}


def folder(path: Path, **files: Any) -> FolderTexts:
    """Files by their names without the ending; None for none."""
    for name, content in {"tokenizer": TOKENIZER, **files}.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (path / f"{name}.json").write_text(text)
    return FolderTexts(path)


def test_a_tokenizer_is_all_that_is_needed(tmp_path: Path) -> None:
    texts = folder(tmp_path)
    assert json.loads(texts.tokenizer_json) == TOKENIZER
    assert (texts.chat_template, texts.generation_defaults) == ("", {})
    assert (texts.eos_token_ids((7, 8)), texts.bos_token_id(5)) == ((7, 8), 5)
    assert (texts.eos_token_ids(()), texts.bos_token_id(None)) == ((), None)


def test_without_a_tokenizer_it_is_said_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json") as caught:
        folder(tmp_path, tokenizer=None)
    assert caught.value.fields["key"] == "model"
    assert "save_pretrained" in str(caught.value.fields["remedy"])


# --- ends and beginnings


@pytest.mark.parametrize(
    ("generation", "eos_token", "of_config", "ends"),
    [
        (None, None, (7,), (7,)),
        (9, None, (7,), (9,)),
        ([9, 7], None, (7,), (9, 7)),
        ([9, 2], "</s>", (7,), (2, 9)),
        ([9, 2], {"content": "</s>"}, (), (2, 9)),
        ([9], "</s>", (), (9,)),
        (None, "</s>", (), (2,)),
        (None, "<unknown>", (7,), (7,)),
        (None, "<no id>", (7,), (7,)),
        ([2, 2], "</s>", (), (2,)),
    ],
)
def test_ends(
    tmp_path: Path, generation: Any, eos_token: Any, of_config: tuple[int, ...], ends: tuple[int, ...]
) -> None:
    """The generation's before the configuration's; of several the tokenizer's first; one that is none of them not."""
    texts = folder(
        tmp_path,
        generation_config={"eos_token_id": generation},
        tokenizer_config={"eos_token": eos_token},
    )
    assert texts.eos_token_ids(of_config) == ends


@pytest.mark.parametrize(
    ("tokenizer_config", "generation", "of_config", "begin"),
    [
        ({}, None, 5, 5),
        ({}, 6, 5, 6),
        ({"bos_token": None}, 6, 5, None),
        ({"bos_token": "<s>"}, 6, 5, 1),
        ({"bos_token": {"content": "<s>", "special": True}}, 6, 5, 1),
        ({"bos_token": "<unknown>"}, 6, 5, None),
        ({}, 0, 5, 0),
    ],
)
def test_beginnings(
    tmp_path: Path, tokenizer_config: Any, generation: int | None, of_config: int, begin: int | None
) -> None:
    """A tokenizer that says it has none goes before a configuration that names one."""
    texts = folder(
        tmp_path, tokenizer_config=tokenizer_config, generation_config={"bos_token_id": generation}
    )
    assert texts.bos_token_id(of_config) == begin


# --- template


def test_a_template_of_one_file_goes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own é")
    assert folder(tmp_path, tokenizer_config={"chat_template": "other"}).chat_template == "own é"


@pytest.mark.parametrize(
    ("given", "template"),
    [
        (None, ""),
        ("one", "one"),
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}], "usual"),
        ([{"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "rag"}], "tools"),
        ([], ""),
    ],
)
def test_templates(tmp_path: Path, given: Any, template: str) -> None:
    assert folder(tmp_path, tokenizer_config={"chat_template": given}).chat_template == template


# --- defaults


def test_defaults_of_generation_config(tmp_path: Path) -> None:
    given = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 9,
        "max_length": 20,
    }
    assert folder(tmp_path, generation_config=given).generation_defaults == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("given", "defaults"),
    [
        ({"temperature": 0.6}, {"temperature": 0.6}),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1, "max_new_tokens": 9},
            {"repetition_penalty": 1.1, "max_tokens": 9},
        ),
        ({"top_k": 0}, {}),
        ({"top_k": -1}, {}),
        ({"top_p": None, "temperature": 0.0}, {"temperature": 0.0}),
    ],
)
def test_what_is_no_default(tmp_path: Path, given: Any, defaults: Any) -> None:
    assert folder(tmp_path, generation_config=given).generation_defaults == defaults


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1},
        {"temperature": 1e308},
        {"top_p": 0},
        {"min_p": 2},
        {"repetition_penalty": 1e-308},
        {"max_new_tokens": 0},
        {"max_new_tokens": 2**64},
        {"eos_token_id": [1, 2**64]},
    ],
    ids=str,
)
def test_defaults_out_of_range_are_refused_when_the_model_is_read(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json .*" + next(iter(given))):
        folder(tmp_path, generation_config=given)


# --- files that are wrong


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config", "{"),
        ("generation_config", {"temperature": "warm"}),
        ("tokenizer_config", "[]"),
        ("tokenizer_config", {"chat_template": 5}),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}\.json cannot be used") as caught:
        folder(tmp_path, **{name: content})
    assert caught.value.fields["key"] == "model"


def test_a_tokenizer_is_read_when_it_is_needed(tmp_path: Path) -> None:
    texts = folder(tmp_path, tokenizer="no json", tokenizer_config={"eos_token": "</s>"})
    assert texts.tokenizer_json == b"no json"
    assert texts.bos_token_id(4) == 4
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be used"):
        texts.eos_token_ids((2,))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        folder(tmp_path)
