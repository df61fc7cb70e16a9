"""Memory is there before it is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvolt.transfer.memory import populate as populate_module
from kvolt.transfer.memory.slabs import Slab

MIB = 1 << 20


def shared_bytes() -> int:
    """Of this process's memory, what is there and others could map."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem"))


@pytest.mark.parametrize("num_cores", [1, 16])
def test_all_of_it_is_there(num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    before = shared_bytes()
    slab = Slab.shared(100, MIB)
    try:
        assert shared_bytes() - before >= 99 * MIB
    finally:
        slab.close()


@pytest.mark.parametrize("num_cores", [1, 16])
def test_a_kernel_that_cannot_is_no_error(num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setattr(populate_module, "_POPULATE_WRITE", 9999)
    before = shared_bytes()
    slab = Slab.shared(100, MIB)
    try:
        assert shared_bytes() - before < MIB
        slab.memory[99 * MIB] = 1
    finally:
        slab.close()
