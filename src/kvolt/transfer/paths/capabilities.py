"""Capabilities: which paths one side has, and for each that it has not why, and what to do about it. Pure.

`machine` collects the facts; what they mean is here. Paths are those of the table of lanes, and `rdma`, which is what
NIXL needs between hosts to read a peer's memory without the peer's doing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvolt.transfer.nixl import library as nixl_library

WANTED_LOCKED_BYTES = 1 << 30
"""RDMA locks what it moves, which is a whole slab: less than this holds none worth the name."""
UNTESTED: dict[str, str] = {
    "rdma": "NIXL over InfiniBand or RoCE between hosts",
    "nvlink": "NVLink between nodes",
    "gpudirect": "a network card that reads and writes GPU memory itself",
}
"""What no test of ours has run, for want of the machines."""

_ALWAYS = ("copy", "file", "tcp")
_CUDA = ("cuda-copy", "cuda-ipc")
_RDMA_TRANSPORTS = ("rc", "ud", "dc")
"""In UCX_TLS, as they are or with a variant behind (rc_x, dc_mlx5); together `ib`."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one side can do."""

    paths: frozenset[str]
    """Names as in the table of lanes, and `rdma` where NIXL has a device for it."""
    missing: dict[str, str] = {}
    """Why it has not those it has not."""
    file_systems: frozenset[str] = frozenset()
    """Those it reads and writes."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on a machine. The defaults are those of one where nothing is wrong and nothing is special."""

    shared_memory_fault: str = ""
    """Why memory cannot be shared with other processes; empty where it can."""
    num_gpus: int = 0
    has_torch: bool = False
    """And Triton."""
    nixl_package: str | None = None
    rdma_devices: tuple[str, ...] = ()
    """With a port that is up."""
    idle_rdma_devices: tuple[str, ...] = ()
    """Without one."""
    lockable_bytes: int | None = None
    """None for any number."""
    ucx_tls: str = ""
    ucx_net_devices: str = ""
    """Empty where they are not set."""


class Missing(msgspec.Struct, frozen=True):
    """Why a path is not there."""

    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}"


def capabilities_of(facts: MachineFacts, shared_memory: bool = True, nixl: bool = True) -> Capabilities:
    """Of an agent on such a machine, for which these were turned on or off."""
    missing = missing_paths(facts)
    if not shared_memory:
        missing["shm"] = Missing("shared memory is turned off", "turn it on (transfer.shared_memory)")
        missing.setdefault("cuda-ipc", missing["shm"])  # it goes by the same socket
    if not nixl:
        missing.setdefault("nixl", Missing("NIXL is turned off", "turn it on (transfer.nixl)"))
    paths = frozenset((*_ALWAYS, *_CUDA, "shm", "nixl", "rdma")) - missing.keys()
    return Capabilities(paths=paths, missing={name: str(why) for name, why in missing.items()})


def missing_paths(facts: MachineFacts) -> dict[str, Missing]:
    """By path, of those that a machine has not."""
    missing: dict[str, Missing] = {}
    against_cuda = next(_against_cuda(facts), None)
    if against_cuda is not None:
        missing |= dict.fromkeys(_CUDA, against_cuda)
    if facts.shared_memory_fault:
        remedy = "use Linux 3.17 or newer with /proc mounted; peers of this host use TCP until then"
        missing["shm"] = Missing(facts.shared_memory_fault, remedy)
    for name, reasons in (("nixl", _against_nixl(facts)), ("rdma", _against_rdma(facts))):
        reason = next(reasons, None)
        if reason is not None:
            missing[name] = reason
    return missing


def _against_cuda(facts: MachineFacts) -> Iterator[Missing]:
    if not facts.num_gpus:
        yield Missing("no NVIDIA GPU is to be seen (/dev/nvidia0)", "in a container pass the GPUs in")
    if not facts.has_torch:
        yield Missing("torch and Triton, which move a GPU's blocks, are not installed", "pip install torch")


def _against_nixl(facts: MachineFacts) -> Iterator[Missing]:
    if facts.nixl_package is None:
        yield Missing("NIXL is not installed", nixl_library.REMEDY)
    if not _lets(facts.ucx_tls, ("tcp",)):
        cause = f"UCX_TLS={facts.ucx_tls} leaves out tcp, by which NIXL's agents find each other"
        yield Missing(cause, "add tcp to UCX_TLS, or unset it")


def _against_rdma(facts: MachineFacts) -> Iterator[Missing]:
    """What comes first hides the rest."""
    if not facts.rdma_devices and facts.idle_rdma_devices:
        names = ", ".join(facts.idle_rdma_devices)
        yield Missing(
            f"no RDMA device has a port that is up ({names})", "see `ibstat`: the cable, the switch"
        )
    if not facts.rdma_devices:
        remedy = "hosts without one use TCP; in a container pass /dev/infiniband and /sys/class/infiniband in"
        yield Missing("no RDMA device in /sys/class/infiniband", remedy)
    if not _lets(facts.ucx_tls, _RDMA_TRANSPORTS, "ib"):
        yield Missing(f"UCX_TLS={facts.ucx_tls} leaves out RDMA", "add rc to UCX_TLS, or unset it")
    if not _names_one(facts.ucx_net_devices, facts.rdma_devices):
        names = ", ".join(f"{name}:1" for name in facts.rdma_devices)
        cause = f"UCX_NET_DEVICES={facts.ucx_net_devices} leaves out all RDMA devices"
        yield Missing(cause, f"add one of {names}, or unset it")
    if facts.lockable_bytes is not None and facts.lockable_bytes < WANTED_LOCKED_BYTES:
        cause = f"only {facts.lockable_bytes >> 10} KiB of memory may be locked (ulimit -l)"
        yield Missing(cause, "ulimit -l unlimited; in a container --ulimit memlock=-1")


def _lets(ucx_tls: str, transports: Sequence[str], together: str = "") -> bool:
    """Whether UCX_TLS leaves one of these: it is a list of those to use, or with ^ in front of those not to."""
    given = ucx_tls.strip().lower()
    names = {name.strip() for name in given.removeprefix("^").split(",")} - {""}
    if not names:
        return True
    if given.startswith("^"):
        return names.isdisjoint(("all", together)) and not names.issuperset(transports)
    kinds = {name.partition("_")[0] for name in names}
    return not kinds.isdisjoint(("all", together, *transports))


def _names_one(ucx_net_devices: str, devices: Sequence[str]) -> bool:
    """Whether UCX_NET_DEVICES, a list of DEVICE:PORT, has one of these. (Newer UCX takes ^ in front here, too.)"""
    given = ucx_net_devices.strip()
    names = {name.strip().partition(":")[0] for name in given.removeprefix("^").split(",") if name.strip()}
    if given.startswith("^"):
        return not names.issuperset(devices)
    return not names or "all" in names or not names.isdisjoint(devices)
