"""Places of memory, and the table of lanes with estimated costs. Pure.

A path is a way of moving bytes (shm, tcp, ...). A lane is a path between two kinds of memory. The same path can be a
hundred times slower with another kind of memory at one end, so speeds belong to lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvolt.transfer.memory.device_memory import MemoryKind


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Location of a slab."""

    kind: MemoryKind
    host: str
    process: str
    """Unique on the host. A pid is not unique across containers."""
    device: str | None = None
    """Device name, equal in all processes of the host."""

    def __post_init__(self) -> None:
        if (self.device is not None) != (self.kind is MemoryKind.DEVICE):
            raise ValueError(
                f"{self.kind} memory with device {self.device}: only device memory names a device"
            )

    @property
    def home(self) -> tuple[str, str]:
        """Owner: the one process that writes to it."""
        return self.host, self.process


class Reach(StrEnum):
    """Distance between the two ends of a lane."""

    PROCESS = "process"
    HOST = "host"
    """Two processes on one host."""
    NETWORK = "network"


def reach(source: Place, destination: Place) -> Reach:
    if source.host != destination.host:
        return Reach.NETWORK
    return Reach.PROCESS if source.home == destination.home else Reach.HOST


class Cost(NamedTuple):
    bytes_per_s: float
    """Bandwidth for large pieces."""
    block_s: float
    """Overhead per piece."""


class Lane(NamedTuple):
    name: str
    """Key of its measured speed; starts with the path."""
    reach: Reach
    sources: frozenset[MemoryKind]
    destinations: frozenset[MemoryKind]
    cost: Cost
    """Estimate used until a speed was measured."""
    needs: tuple[str, ...] = ()
    """Capabilities required of both sides besides the path."""
    reader_needs: tuple[str, ...] = ()
    """Further capabilities required of the destination."""
    same_device: bool | None = None
    """Whether both ends must be the same device; None: either."""

    @property
    def path(self) -> str:
        return self.name.partition("/")[0]


_DEVICE = frozenset((MemoryKind.DEVICE,))
_PINNED = frozenset((MemoryKind.PINNED,))
_SHARED = frozenset((MemoryKind.SHARED,))
_PAGEABLE = frozenset((MemoryKind.HOST, MemoryKind.SHARED))
_MAPPABLE = frozenset((MemoryKind.SHARED, MemoryKind.PINNED))
_RAM = _PAGEABLE | _PINNED
_ANY = _RAM | _DEVICE

# Initial estimates, replaced by measured speeds. GPU values were measured on an H200 with PCIe 5, blocks gathered by a
# kernel: 2.0 TB/s on the device and over IPC, 52 GB/s to and from pinned memory, 13 GB/s pageable. NIXL reaches 1.2
# TB/s there, with 12 us per block. One thread copies 10 to 20 GB/s in RAM, loopback carries 2.5 GB/s. Between devices
# and between hosts nothing was measured: PCIe, 10 Gbit/s Ethernet and 100 Gbit/s RDMA are assumed.
_COPY = Cost(10e9, 0.5e-6)
_ON_DEVICE = Cost(2000e9, 20e-9)
_BETWEEN_DEVICES = Cost(40e9, 20e-9)
_PCIE_PINNED = Cost(52e9, 20e-9)
_PCIE_PAGEABLE = Cost(13e9, 20e-9)
_MAPPED = Cost(9.5e9, 0.5e-6)
_IPC = Cost(1900e9, 20e-9)
_NIXL_RAM = Cost(5e9, 10e-6)
_NIXL_DEVICE = Cost(1200e9, 12e-6)
_NIXL_STAGED = Cost(0.5e9, 12e-6)
_NIXL_RDMA = Cost(10e9, 2e-6)
_NIXL_TCP = Cost(1e9, 10e-6)

LANES: tuple[Lane, ...] = (
    Lane("copy", Reach.PROCESS, _RAM, _RAM, _COPY),
    Lane("cuda-copy/device-device", Reach.PROCESS, _DEVICE, _DEVICE, _ON_DEVICE, same_device=True),
    Lane("cuda-copy/device-peer", Reach.PROCESS, _DEVICE, _DEVICE, _BETWEEN_DEVICES, same_device=False),
    Lane("cuda-copy/device-pinned", Reach.PROCESS, _DEVICE, _PINNED, _PCIE_PINNED),
    Lane("cuda-copy/pinned-device", Reach.PROCESS, _PINNED, _DEVICE, _PCIE_PINNED),
    Lane("cuda-copy/device-host", Reach.PROCESS, _DEVICE, _PAGEABLE, _PCIE_PAGEABLE),
    Lane("cuda-copy/host-device", Reach.PROCESS, _PAGEABLE, _DEVICE, _PCIE_PAGEABLE),
    Lane("shm", Reach.HOST, _MAPPABLE, _RAM, _MAPPED),
    # The reader copies from the mapping, which it pins if possible, directly to its device.
    Lane("shm/pinned-device", Reach.HOST, _PINNED, _DEVICE, _PCIE_PINNED, reader_needs=("cuda-copy",)),
    Lane("shm/host-device", Reach.HOST, _SHARED, _DEVICE, _PCIE_PAGEABLE, reader_needs=("cuda-copy",)),
    Lane("cuda-ipc/device-device", Reach.HOST, _DEVICE, _DEVICE, _IPC, same_device=True),
    Lane("cuda-ipc/device-peer", Reach.HOST, _DEVICE, _DEVICE, _BETWEEN_DEVICES, same_device=False),
    Lane("cuda-ipc/device-pinned", Reach.HOST, _DEVICE, _PINNED, _PCIE_PINNED),
    Lane("cuda-ipc/device-host", Reach.HOST, _DEVICE, _PAGEABLE, _PCIE_PAGEABLE),
    Lane("nixl", Reach.HOST, _RAM, _RAM, _NIXL_RAM),
    Lane("nixl/device-device", Reach.HOST, _DEVICE, _DEVICE, _NIXL_DEVICE, same_device=True),
    Lane(
        "nixl/device-peer",
        Reach.HOST,
        _DEVICE,
        _DEVICE,
        _BETWEEN_DEVICES._replace(block_s=12e-6),
        same_device=False,
    ),
    Lane("nixl/device-host", Reach.HOST, _DEVICE, _RAM, _NIXL_STAGED),
    Lane("nixl/host-device", Reach.HOST, _RAM, _DEVICE, _NIXL_STAGED),
    Lane("tcp", Reach.HOST, _RAM, _RAM, Cost(2.5e9, 1e-6)),
    Lane("nixl/rdma", Reach.NETWORK, _ANY, _ANY, _NIXL_RDMA, needs=("rdma",)),
    Lane("nixl", Reach.NETWORK, _RAM, _RAM, _NIXL_TCP),
    Lane("nixl/device-any", Reach.NETWORK, _DEVICE, _ANY, _NIXL_STAGED),
    Lane("nixl/host-device", Reach.NETWORK, _RAM, _DEVICE, _NIXL_STAGED),
    Lane("tcp", Reach.NETWORK, _RAM, _RAM, Cost(1.2e9, 1e-6)),
)


def lanes(source: Place, destination: Place) -> Iterator[Lane]:
    """Lanes from `source` to `destination`, regardless of capabilities."""
    distance = reach(source, destination)
    is_same_device = source.device == destination.device
    for lane in LANES:
        if (
            lane.reach is distance
            and source.kind in lane.sources
            and destination.kind in lane.destinations
            and lane.same_device in (None, is_same_device)
        ):
            yield lane
