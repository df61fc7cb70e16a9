"""`kvolt cache`: what a disk tier has, from outside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.unit.kv.tiers.tier_lab import BLOCK_BYTES, contents, in_eight_bits, sequence

from kvolt.cli.main import main
from kvolt.kv.disk.blocks import DiskBlocks
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.fp8 import Fp8
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import Slot

SHAPE = BlockShape(BLOCK_BYTES)
BLOCKS = sequence("a", 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With five blocks that nobody has now."""
    files, memory = DiskFiles(tmp_path, SHAPE, 20), SlotMemory(SHAPE, 5)
    places = np.arange(5, dtype=np.int64)
    [(part, _, _)] = memory.by_part(places)
    for index, block in enumerate(BLOCKS):
        part.memory[index * SHAPE.slot_bytes : index * SHAPE.slot_bytes + BLOCK_BYTES] = contents(block)
    sums = memory.checksums(places, [block.key for block in BLOCKS]).tolist()
    blocks = DiskBlocks(files)
    blocks.write(BLOCKS, sums, [Slot(each) for each in (3, 1, 4, 0, 2)], memory, places)
    blocks.close()
    files.close()
    memory.close()
    return tmp_path


@pytest.fixture
def owned(folder: Path) -> Iterator[Path]:
    files = DiskFiles(folder, SHAPE, 20)
    yield folder
    files.close()


def spoil(folder: Path, slot: int) -> None:
    [path] = folder.rglob("blocks-0000")
    data = bytearray(path.read_bytes())
    data[slot * SHAPE.slot_bytes + 9] ^= 1
    path.write_bytes(data)


def test_how_much_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stat", "--dir", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "5 of 20 blocks" in told
    assert "not in use" in told
    assert main(["cache", "stat", "--dir", str(folder), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["blocks"], row["bytes"], row["owned"]) == (5, 5 * BLOCK_BYTES, False)


def test_who_has_it_is_told(owned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stat", str(owned)]) == 0
    assert "in use by a worker" in capsys.readouterr().out
    assert main(["cache", "evict", "--all", "--dir", str(owned)]) == 1
    assert "stop it" in capsys.readouterr().err


def test_every_block_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", "--dir", str(folder)]) == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()] == [block.key.hex() for block in BLOCKS]
    assert main(["cache", "ls", "--json", str(folder)]) == 0
    assert main(["cache", "ls", str(folder), "--object", "s3://b/p"]) == 2
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["position"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[1]["parent"] == rows[0]["key"]


def test_what_is_spoiled_is_found_and_can_be_forgotten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "verify", "--dir", str(folder)]) == 0
    spoil(folder, 4)
    assert main(["cache", "verify", "--dir", str(folder)]) == 1
    assert f"corrupt: {BLOCKS[2].key.hex()}" in capsys.readouterr().out
    assert main(["cache", "evict", "--corrupt", "--dir", str(folder)]) == 0
    assert "1 blocks removed" in capsys.readouterr().out
    assert main(["cache", "verify", "--dir", str(folder)]) == 0
    assert "4 of 4 blocks are valid" in capsys.readouterr().out


def test_a_file_that_is_gone_is_no_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [path] = folder.rglob("blocks-0000")
    path.unlink()
    assert main(["cache", "verify", "--dir", str(folder)]) == 1
    assert capsys.readouterr().out.count("corrupt: ") == 5


def test_blocks_are_forgotten_by_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = BLOCKS[1].key.hex()
    assert main(["cache", "evict", "--key", key[:12].upper(), "--dir", str(folder)]) == 0
    assert main(["cache", "evict", "--key", "", "--dir", str(folder)]) == 0
    assert "0 blocks removed" in capsys.readouterr().out
    assert main(["cache", "ls", "--dir", str(folder)]) == 0
    told = capsys.readouterr().out
    assert key not in told
    assert len(told.splitlines()) == 4


def test_the_bytes_of_a_block(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "block.bin"
    assert main(["cache", "export", BLOCKS[3].key.hex()[:10], str(out), "--dir", str(folder)]) == 0
    assert out.read_bytes() == contents(BLOCKS[3])
    spoil(folder, 0)
    assert main(["cache", "export", BLOCKS[3].key.hex(), str(out), "--dir", str(folder)]) == 2
    assert "has a wrong checksum" in capsys.readouterr().err
    assert main(["cache", "export", "ffffffffff", str(out), "--dir", str(folder)]) == 2
    assert "no block" in capsys.readouterr().err


def test_a_folder_in_eight_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = BlockShape(5000, 2, "bfloat16")
    files, memory = DiskFiles(tmp_path, shape, 20, Fp8.of(shape)), SlotMemory(shape, 5)
    places, there = np.arange(5, dtype=np.int64), DiskBlocks(files)
    for index, block in enumerate(BLOCKS):
        with memory.block(index) as view:
            view[:] = contents(block, num_bytes=10_000)
    sums = memory.checksums(places, [block.key for block in BLOCKS]).tolist()
    there.write(BLOCKS, sums, [Slot(each) for each in range(5)], memory, places)
    for each in (there, files, memory):
        each.close()
    where = ("--dir", str(tmp_path))
    assert main(["cache", "stat", *where]) == 0
    assert "bfloat16 as fp8 (lossy)" in capsys.readouterr().out
    assert main(["cache", "stat", "--json", *where]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["form"], row["bytes"]) == ("fp8x64-bfloat16", 5 * 2 * (2500 + 40))
    assert main(["cache", "ls", *where]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    out = tmp_path / "block.bin"
    assert main(["cache", "export", BLOCKS[3].key.hex(), str(out), *where]) == 0
    assert out.read_bytes() == in_eight_bits(contents(BLOCKS[3], num_bytes=10_000), shape)
    assert main(["cache", "verify", *where]) == 0
    [path] = tmp_path.rglob("blocks-0000")
    data = bytearray(path.read_bytes())
    data[files.shape.slot_bytes + 5070] ^= 1  # the last byte that says how large a group is
    path.write_bytes(data)
    assert main(["cache", "verify", *where]) == 1
    assert f"corrupt: {BLOCKS[1].key.hex()}" in capsys.readouterr().out
    [about] = tmp_path.rglob("about.json")
    about.write_text(about.read_text().replace("fp8x64", "fp6x32"))
    assert main(["cache", "stat", *where]) == 2
    assert "another version" in capsys.readouterr().err


def test_a_folder_without_any_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stat", "--dir", str(tmp_path)]) == 2
    assert "no KV blocks in" in capsys.readouterr().err
    part = tmp_path / "v1-5000x1" / "00"
    part.mkdir(parents=True)
    (part / "about.json").write_text("{")
    assert main(["cache", "ls", "--dir", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err
