"""JSON files of a model: a file that cannot be used is named, whatever is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvolt.core.errors import ConfigError
from kvolt.models.config import read_hf_config
from kvolt.models.generation_config import GenerationConfig
from kvolt.models.json_files import read_json, read_required

NESTED = b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


def test_files_are_decoded_or_missing(tmp_path: Path) -> None:
    assert read_json(tmp_path, "none.json", dict) is None
    (tmp_path / "some.json").write_text('{"a": 1}')
    assert read_json(tmp_path, "some.json", dict[str, int]) == {"a": 1}
    assert read_required(tmp_path, "some.json", "make one") == b'{"a": 1}'
    with pytest.raises(ConfigError) as caught:
        read_required(tmp_path, "none.json", "make one")
    assert caught.value.fields == {"key": "model", "remedy": "make one"}


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"{", b'{"temperature": "\xff"}', NESTED])
@pytest.mark.parametrize("kind", [GenerationConfig, dict[str, Any]])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, kind: type[Any]) -> None:
    (tmp_path / "some.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"some\.json cannot be used"):
        read_json(tmp_path, "some.json", kind)


def test_a_nested_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be used"):
        read_hf_config(NESTED, "float32")
