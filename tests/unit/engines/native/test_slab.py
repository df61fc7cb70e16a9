"""The slab: one piece per block, and memory that another mapping sees."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from kvolt.engines.native.slab import KvSlab, SlabShape


def memory_file(num_bytes: int) -> int:
    """A descriptor of anonymous memory, as a shell gives one."""
    descriptor = os.memfd_create("kv")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


SHAPE = SlabShape(num_blocks=5, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype="float32")


@pytest.mark.parametrize("shared", [True, False])
def test_a_block_is_one_piece_with_all_layers(shared: bool) -> None:
    descriptor = memory_file(SHAPE.num_bytes) if shared else None
    slab = KvSlab(SHAPE, descriptor=descriptor)
    if descriptor is not None:
        os.close(descriptor)
    for layer in range(3):
        keys, values = slab.layer(layer)
        keys[2] = layer + 1
        values[2] = -(layer + 1)
    data = slab.read(2)
    assert len(data) == SHAPE.block_bytes
    numbers = torch.frombuffer(bytearray(data), dtype=torch.float32).view(3, 2, -1)
    assert numbers[:, 0].unique(dim=1).squeeze(1).tolist() == [1, 2, 3]
    assert numbers[:, 1].unique(dim=1).squeeze(1).tolist() == [-1, -2, -3]
    slab.write(4, data)
    assert slab.read(4) == data
    assert slab.read(3) == bytes(SHAPE.block_bytes)


def test_another_process_could_map_it() -> None:
    descriptor = memory_file(SHAPE.num_bytes)
    slab = KvSlab(SHAPE, descriptor=descriptor)
    slab.layer(0)[0][1] = 7
    with mmap.mmap(descriptor, SHAPE.num_bytes) as seen:
        piece = seen[SHAPE.block_bytes : 2 * SHAPE.block_bytes]
    os.close(descriptor)
    assert piece == slab.read(1)
    assert any(piece)


def test_bytes_of_other_types_round_trip() -> None:
    shape = SlabShape(num_blocks=2, num_layers=1, num_kv_heads=1, block_size=2, head_dim=4, dtype="bfloat16")
    slab = KvSlab(shape)
    slab.tensor[0] = torch.randn(shape.dims[1:]).bfloat16()
    slab.write(1, slab.read(0))
    assert torch.equal(slab.tensor[0], slab.tensor[1])
