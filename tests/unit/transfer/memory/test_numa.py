"""Which node is a device's, and memory there."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvolt.transfer.memory import numa
from kvolt.transfer.memory import populate as populate_module
from kvolt.transfer.memory.slabs import Slab


@pytest.mark.parametrize(
    ("nodes", "told", "expected"),
    [("0-1", "1", 1), ("0-1", "-1", None), ("0-1", "junk", None), ("0", "0", None), ("0,2", "2", 2)],
)
def test_the_node_of_a_device(
    nodes: str, told: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0000:0a:00.0").mkdir()
    (tmp_path / "0000:0a:00.0" / "numa_node").write_text(f"{told}\n")
    (tmp_path / "online").write_text(f"{nodes}\n")
    monkeypatch.setattr(numa, "_PCI", tmp_path)
    monkeypatch.setattr(numa, "_NODES", tmp_path / "online")
    assert numa.node_of_pci("0000:0A:00.0") == expected
    assert numa.node_of_pci("0000:0b:00.0") is None, "there is no such device"


def test_memory_is_asked_for_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int, int]] = []

    def call(number: int, address: int, num_bytes: int, mode: int, mask: Any, num_bits: int) -> int:
        assert num_bits == 8 * ctypes.sizeof(mask)
        [node] = [word * 64 + bit for word in range(16) for bit in range(64) if mask[word] >> bit & 1]
        calls.append((address, num_bytes, mode, node))
        return 0

    monkeypatch.setattr(numa, "_call", call)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    slab = Slab.shared(4, mmap.PAGESIZE, node=70)
    try:
        address = np.frombuffer(slab.memory, dtype=np.uint8).ctypes.data
        assert calls == [(address, 4 * mmap.PAGESIZE, 1, 70)]
    finally:
        slab.close()
    monkeypatch.setattr(platform, "machine", lambda: "z80")
    assert not numa.prefer_node(0, 1, 0)


def test_a_system_without_numa_placement_is_logged_and_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(populate_module, "prefer_node", lambda address, num_bytes, node: False)
    slab = Slab.shared(4, mmap.PAGESIZE, node=1)
    slab.memory[0] = 1
    slab.close()
    assert "node=1" in caplog.text


def test_the_system_is_really_asked() -> None:
    """One that has no such call says so; one that has takes its own first node."""
    slab = Slab.shared(4, mmap.PAGESIZE)
    address = np.frombuffer(slab.memory, dtype=np.uint8).ctypes.data
    assert numa.prefer_node(address, 4 * mmap.PAGESIZE, 0) == Path("/sys/devices/system/node").exists()
    assert not numa.prefer_node(address, 4 * mmap.PAGESIZE, 1000), "there is no such node"
    slab.close()
