"""Descriptions of the disk's blocks outlive a vLLM, and nothing that is wrong with their file is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvolt.engines.vllm.plugins import tier_names
from kvolt.engines.vllm.plugins.tier_names import BlockDescription, NamesFile, packed_tokens


def described(number: int) -> BlockDescription:
    return BlockDescription(
        number, b"name%d" % number, b"parent" if number else None, packed_tokens([number, 70_000]), ["salt"]
    )


def kept(folder: Path, *numbers: int) -> NamesFile:
    names = NamesFile(folder)
    names.read()
    for number in numbers:
        names.keep(described(number))
    names.flush()
    return names


def test_what_was_kept_is_read(tmp_path: Path) -> None:
    kept(tmp_path / "names", 0, 1, 1).close()
    kept(tmp_path / "names", 1, 2).close()
    found = NamesFile(tmp_path / "names").read()
    assert found == {number: described(number) for number in range(3)}
    assert found[2].token_ids == [2, 70_000]


@pytest.mark.parametrize("spoil", ["torn", "bit"])
def test_what_is_torn_or_spoiled_ends_the_file_and_what_follows_is_kept(tmp_path: Path, spoil: str) -> None:
    kept(tmp_path, 0, 1).close()
    path = tmp_path / "00.names"
    content = bytearray(path.read_bytes())
    if spoil == "torn":
        del content[-3:]
    else:
        content[-3] ^= 1
    path.write_bytes(content)
    kept(tmp_path, 5).close()
    assert set(NamesFile(tmp_path).read()) == {0, 5}


def test_each_writes_its_own_and_reads_all(tmp_path: Path) -> None:
    one, other = kept(tmp_path, 1), kept(tmp_path, 2)
    third = NamesFile(tmp_path)
    assert set(third.read()) == {1, 2}
    for each in (one, other, third):
        each.close()
    assert len(list(tmp_path.glob("*.names"))) == 2


def test_a_file_that_is_mostly_of_the_past_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_names, "_SPARE_RECORDS", 2)
    names = kept(tmp_path, *range(6))
    assert not names.is_long(2)
    assert names.is_long(1)
    names.rewrite([described(3)])
    assert not names.is_long(1)
    for number in (3, 4):
        names.keep(described(number))
    names.flush()
    names.close()
    assert (tmp_path / "00.names").read_bytes().count(b"name3") == 1, "it was there"
    assert set(NamesFile(tmp_path).read()) == {3, 4}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    names = kept(tmp_path / "file" / "names", 1)
    assert names.read() == {}
    names.rewrite([described(1)])
    assert not names.is_long(0)
    names.close()
