"""Probes the machine for the facts from which `capabilities` derives the available paths."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from kvolt.transfer.paths import nixl_library
from kvolt.transfer.paths.capabilities import MachineFacts

_DEV = Path("/dev")
_INFINIBAND = Path("/sys/class/infiniband")
_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14
"""Capability that lifts the limit on locked memory."""


def probe_machine(
    environ: Mapping[str, str],
    infiniband: Path = _INFINIBAND,
    status: Path = _STATUS,
    devices_in: Path = _DEV,
) -> MachineFacts:
    """`environ`: environment with the UCX settings."""
    devices = rdma_devices(infiniband)
    return MachineFacts(
        shared_memory_fault=shared_memory_fault(),
        num_gpus=num_gpus(devices_in),
        has_torch=all(map(find_spec, ("torch", "triton"))),
        nixl_package=nixl_library.find_package(),
        rdma_devices=tuple(name for name, is_up in devices.items() if is_up),
        idle_rdma_devices=tuple(name for name, is_up in devices.items() if not is_up),
        lockable_bytes=lockable_bytes(status),
        ucx_tls=environ.get("UCX_TLS", ""),
        ucx_net_devices=environ.get("UCX_NET_DEVICES", ""),
    )


def num_gpus(folder: Path) -> int:
    """NVIDIA GPUs, counted by device files."""
    return sum(each.name[len("nvidia") :].isdigit() for each in folder.glob("nvidia*"))


def shared_memory_fault() -> str:
    """Reason why memory cannot be shared read-only by descriptor; empty if it can."""
    try:
        descriptor = os.memfd_create("kvolt-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        return f"the kernel has no memfd ({error})"
    try:
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return f"/proc is not mounted, which read-only sharing needs ({error.strerror})"
    finally:
        os.close(descriptor)
    return ""


def rdma_devices(folder: Path) -> dict[str, bool]:
    """RDMA devices by name, and whether one of their ports is up."""
    try:
        names = sorted(each.name for each in folder.iterdir())
    except OSError:
        return {}
    return {name: any(map(_is_active, (folder / name).glob("ports/*/state"))) for name in names}


def lockable_bytes(status: Path) -> int | None:
    """Limit on locked memory; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or _may_lock_any(status) else soft


def _may_lock_any(status: Path) -> bool:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def _is_active(state: Path) -> bool:
    try:
        return "ACTIVE" in state.read_text()
    except OSError:
        return False
