"""Slabs: memory that peers may read and only its owner writes to."""

from __future__ import annotations

import mmap
import os

import pytest

from kvolt.transfer.memory.slabs import Slab, map_for_reading

BLOCK = 4096


def test_who_has_the_descriptor_cannot_write() -> None:
    """Not even by opening it again for writing, which a process of the same user may do."""
    slab = Slab.shared(2, BLOCK)
    slab.memory[:5] = b"hello"
    shown = slab.read_only()
    assert shown is not None
    again = os.open(f"/proc/self/fd/{shown}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, BLOCK)
    with pytest.raises(PermissionError):
        os.write(again, b"x")
    os.close(again)
    mapped = map_for_reading(shown, 2 * BLOCK)
    slab.memory[:5] = b"there"  # its owner goes on
    assert mapped[:5] == b"there"
    mapped.close()
    slab.close()


def test_all_of_a_shared_slab_is_there_at_once() -> None:
    """Who first receives into it does not wait for its pages."""
    slab = Slab.shared(64, BLOCK)
    assert slab.descriptor is not None
    assert os.fstat(slab.descriptor).st_blocks * 512 == 64 * BLOCK
    slab.close()


def test_a_view_that_is_left_does_not_fail_the_close() -> None:
    """A stored traceback keeps the locals of its frames alive."""
    slab = Slab.shared(2, BLOCK)
    assert slab._map is not None
    view, descriptor = memoryview(slab._map), slab.descriptor
    assert descriptor is not None
    slab.close()
    view[:5] = b"there"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
