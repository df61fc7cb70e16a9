"""PathCapabilities: the paths one side supports, with cause and remedy for each missing one. Pure.

Derived from the facts that `machine` collects. Names are the paths of the lane table and `rdma`, which NIXL needs for
one-sided reads between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvolt.transfer.paths import nixl_library

MIN_LOCKED_BYTES = 1 << 30
"""Minimum limit on locked memory for RDMA, which locks whole slabs."""
UNTESTED: dict[str, str] = {
    "rdma": "NIXL over InfiniBand or RoCE between hosts",
    "nvlink": "NVLink between nodes",
    "gpudirect": "a network card that reads and writes GPU memory itself",
}
"""Hardware on which no test has run."""

_ALWAYS = ("copy", "tcp")
_CUDA = ("cuda-copy", "cuda-ipc")
_RDMA_TRANSPORTS = ("rc", "ud", "dc")
"""Names in UCX_TLS, possibly with a variant suffix (rc_x, dc_mlx5); `ib` stands for all."""


class PathCapabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Paths that one side supports."""

    paths: frozenset[str]
    """Path names of the lane table, and `rdma` if NIXL has an RDMA device."""
    missing: dict[str, str] = {}
    """Cause and remedy for each missing path."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a machine. The defaults describe one without faults and special hardware."""

    shared_memory_fault: str = ""
    """Reason why memory cannot be shared with other processes; empty if it can."""
    num_gpus: int = 0
    has_torch: bool = False
    """PyTorch and Triton are installed."""
    nixl_package: str | None = None
    rdma_devices: tuple[str, ...] = ()
    """RDMA devices with a port that is up."""
    idle_rdma_devices: tuple[str, ...] = ()
    """RDMA devices without one."""
    lockable_bytes: int | None = None
    """Limit on locked memory; None: unlimited."""
    ucx_tls: str = ""
    ucx_net_devices: str = ""
    """UCX settings; empty if not set."""


class MissingPath(msgspec.Struct, frozen=True):
    """Cause and remedy of a missing path."""

    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}"


def capabilities_of(facts: MachineFacts, shared_memory: bool = True, nixl: bool = True) -> PathCapabilities:
    """Capabilities of an agent on this machine with these settings."""
    missing = missing_paths(facts)
    if not shared_memory:
        missing["shm"] = MissingPath("shared memory is turned off", "turn it on (transfer.shared_memory)")
        missing.setdefault("cuda-ipc", missing["shm"])  # uses the same Unix socket
    if not nixl:
        missing.setdefault("nixl", MissingPath("NIXL is turned off", "turn it on (transfer.nixl)"))
    paths = frozenset((*_ALWAYS, *_CUDA, "shm", "nixl", "rdma")) - missing.keys()
    return PathCapabilities(paths=paths, missing={name: str(path) for name, path in missing.items()})


def missing_paths(facts: MachineFacts) -> dict[str, MissingPath]:
    """Missing paths of a machine, by name."""
    missing: dict[str, MissingPath] = {}
    cuda_fault = next(_cuda_faults(facts), None)
    if cuda_fault is not None:
        missing |= dict.fromkeys(_CUDA, cuda_fault)
    if facts.shared_memory_fault:
        remedy = "use Linux 3.17 or newer with /proc mounted; peers of this host use TCP until then"
        missing["shm"] = MissingPath(facts.shared_memory_fault, remedy)
    for name, reasons in (("nixl", _nixl_faults(facts)), ("rdma", _rdma_faults(facts))):
        reason = next(reasons, None)
        if reason is not None:
            missing[name] = reason
    return missing


def _cuda_faults(facts: MachineFacts) -> Iterator[MissingPath]:
    if not facts.num_gpus:
        yield MissingPath("no NVIDIA GPU found (/dev/nvidia0)", "in a container, pass the GPUs in")
    if not facts.has_torch:
        yield MissingPath("PyTorch and Triton, which copy GPU blocks, are not installed", "pip install torch")


def _nixl_faults(facts: MachineFacts) -> Iterator[MissingPath]:
    if facts.nixl_package is None:
        yield MissingPath("NIXL is not installed", nixl_library.REMEDY)
    if not _ucx_tls_allows(facts.ucx_tls, ("tcp",)):
        cause = f"UCX_TLS={facts.ucx_tls} excludes tcp, which NIXL agents need to connect"
        yield MissingPath(cause, "add tcp to UCX_TLS, or unset it")


def _rdma_faults(facts: MachineFacts) -> Iterator[MissingPath]:
    """Yield faults in order of precedence."""
    if not facts.rdma_devices and facts.idle_rdma_devices:
        names = ", ".join(facts.idle_rdma_devices)
        yield MissingPath(
            f"no RDMA device has a port that is up ({names})", "check cable and switch with `ibstat`"
        )
    if not facts.rdma_devices:
        remedy = (
            "hosts without one use TCP; in a container, pass /dev/infiniband and /sys/class/infiniband in"
        )
        yield MissingPath("no RDMA device in /sys/class/infiniband", remedy)
    if not _ucx_tls_allows(facts.ucx_tls, _RDMA_TRANSPORTS, "ib"):
        yield MissingPath(f"UCX_TLS={facts.ucx_tls} excludes RDMA", "add rc to UCX_TLS, or unset it")
    if not _ucx_devices_include(facts.ucx_net_devices, facts.rdma_devices):
        names = ", ".join(f"{name}:1" for name in facts.rdma_devices)
        cause = f"UCX_NET_DEVICES={facts.ucx_net_devices} excludes all RDMA devices"
        yield MissingPath(cause, f"add one of {names}, or unset it")
    if facts.lockable_bytes is not None and facts.lockable_bytes < MIN_LOCKED_BYTES:
        cause = f"only {facts.lockable_bytes >> 10} KiB of memory may be locked (ulimit -l)"
        yield MissingPath(cause, "ulimit -l unlimited; in a container, --ulimit memlock=-1")


def _ucx_tls_allows(ucx_tls: str, transports: Sequence[str], group: str = "") -> bool:
    """Whether UCX_TLS allows one of these transports. It lists those to use, or with a leading ^ those to exclude."""
    value = ucx_tls.strip().lower()
    names = {name.strip() for name in value.removeprefix("^").split(",")} - {""}
    if not names:
        return True
    if value.startswith("^"):
        return names.isdisjoint(("all", group)) and not names.issuperset(transports)
    kinds = {name.partition("_")[0] for name in names}
    return not kinds.isdisjoint(("all", group, *transports))


def _ucx_devices_include(ucx_net_devices: str, devices: Sequence[str]) -> bool:
    """Whether UCX_NET_DEVICES, a list of DEVICE:PORT, allows one of these. Newer UCX also accepts a leading ^."""
    value = ucx_net_devices.strip()
    names = {name.strip().partition(":")[0] for name in value.removeprefix("^").split(",") if name.strip()}
    if value.startswith("^"):
        return not names.issuperset(devices)
    return not names or "all" in names or not names.isdisjoint(devices)
