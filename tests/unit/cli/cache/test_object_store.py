"""`kvolt cache --object`: what workers share in a store, from outside."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from tests.unit.kv.tiers.tier_lab import BLOCK_BYTES, contents, sequence

from kvolt.cli.main import main
from kvolt.kv.object_store.blocks import ObjectBlocks
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory

BLOCKS = sequence("a", 5)
KEYS = [block.key for block in BLOCKS]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """With five blocks, and a file that is none."""
    shape = BlockShape(BLOCK_BYTES)
    blocks, memory = ObjectBlocks(str(tmp_path), shape), SlotMemory(shape, 5)
    for slot, block in enumerate(BLOCKS):
        with memory.block(slot) as view:
            view[:] = contents(block)
    slots = np.arange(5, dtype=np.int64)
    assert blocks.write(KEYS, memory.checksums(slots, KEYS).tolist(), memory, slots) == [True] * 5
    blocks.close()
    memory.close()
    (tmp_path / "kv1" / "5000x1" / "notes.txt").write_text("somebody's")
    return str(tmp_path)


def file_of(store: str, index: int) -> Path:
    [path] = Path(store).rglob(KEYS[index].hex())
    return path


def keys_in(store: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    assert main(["cache", "ls", "--object", store, "--json"]) == 0
    return {json.loads(line)["key"] for line in capsys.readouterr().out.splitlines()}


def test_how_much_is_there(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stat", "--object", store]) == 0
    assert "5 blocks of" in capsys.readouterr().out
    assert main(["cache", "stat", "--object", store, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["blocks"], row["block_bytes"], row["ranks"]) == (5, BLOCK_BYTES, 1)
    assert row["bytes"] > 5 * BLOCK_BYTES, "each has a head"
    assert keys_in(store, capsys) == {key.hex() for key in KEYS}


def test_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stat", "--object", str(tmp_path)]) == 0
    assert "no blocks" in capsys.readouterr().out


def test_what_is_spoiled_is_told_and_removed(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", "--object", store]) == 0
    assert "5 of 5 blocks are valid" in capsys.readouterr().out
    data = bytearray(file_of(store, 1).read_bytes())
    data[99] ^= 1
    file_of(store, 1).write_bytes(data)
    file_of(store, 3).write_bytes(b"short")
    assert main(["cache", "verify", "--object", store]) == 1
    told = capsys.readouterr().out
    assert f"corrupt: {KEYS[1].hex()}" in told
    assert f"corrupt: {KEYS[3].hex()}" in told
    assert main(["cache", "evict", "--object", store, "--corrupt"]) == 0
    assert "2 blocks removed" in capsys.readouterr().out
    assert main(["cache", "verify", "--object", store]) == 0


def test_what_is_old_is_removed(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    long_ago = time.time() - 8 * 86_400
    os.utime(file_of(store, 2), (long_ago, long_ago))
    assert main(["cache", "evict", "--object", store, "--older-than", "7d"]) == 0
    assert "1 blocks removed" in capsys.readouterr().out
    assert keys_in(store, capsys) == {key.hex() for key in KEYS} - {KEYS[2].hex()}


def test_by_key_and_all(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "evict", "--object", store, "--key", KEYS[0].hex()[:20]]) == 0
    capsys.readouterr()
    assert KEYS[0].hex() not in keys_in(store, capsys)
    assert main(["cache", "evict", "--object", store, "--all"]) == 0
    capsys.readouterr()
    assert keys_in(store, capsys) == set()
    assert (Path(store) / "kv1" / "5000x1" / "notes.txt").exists(), "what is not ours stays"


def test_the_bytes_of_one(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "block.bin"
    assert main(["cache", "export", KEYS[4].hex(), str(target), "--object", store]) == 0
    assert target.read_bytes() == contents(BLOCKS[4])
    assert main(["cache", "export", "ffffffffff", str(target), "--object", store]) != 0
    assert "no block with key prefix" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["evict", "--object", "STORE", "--older-than", "soon"], "for example 30m, 12h or 7d"),
        (["stat", "--object", "nosuch://x/y"], "invalid object store"),
        (["evict", "--older-than", "7d", "--dir", "STORE"], "use --object"),
    ],
)
def test_what_is_wrong_is_told(
    arguments: list[str], told: str, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", *(store if each == "STORE" else each for each in arguments)]) != 0
    assert told in capsys.readouterr().err
