"""What a machine can do, and why not: from faked facts, and that the facts of this one are found."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec
import pytest

from kvolt.transfer.paths import machine
from kvolt.transfer.paths.capabilities import MachineFacts, PathCapabilities, capabilities_of, missing_paths
from kvolt.transfer.paths.machine import lockable_bytes, probe_machine, rdma_devices, shared_memory_fault

FULL = MachineFacts(nixl_package="nixl_cu12", rdma_devices=("mlx5_0",))


def why(path: str, **facts: object) -> str:
    """Why a machine with everything but these has not a path; empty where it has it."""
    found = missing_paths(msgspec.structs.replace(FULL, **facts)).get(path)
    return "" if found is None else str(found)


def test_a_machine_with_everything_has_every_path_that_workers_use() -> None:
    can = capabilities_of(FULL)
    assert can.paths == {"copy", "tcp", "shm", "nixl", "rdma"}
    assert set(can.missing) == {"cuda-copy", "cuda-ipc"}


def test_a_bare_machine_has_the_paths_that_need_nothing() -> None:
    can = capabilities_of(MachineFacts(shared_memory_fault="the kernel has no memfd"))
    assert can.paths == {"copy", "tcp"}
    assert "no memfd" in can.missing["shm"]
    assert "pip install --no-deps nixl-cu12" in can.missing["nixl"]
    assert "/sys/class/infiniband" in can.missing["rdma"]


def test_what_is_turned_off_is_missing_with_the_option_as_the_remedy() -> None:
    can = capabilities_of(FULL, shared_memory=False, nixl=False)
    assert can.paths == {"copy", "tcp", "rdma"}
    assert "transfer.shared_memory" in can.missing["shm"]
    assert "transfer.nixl" in can.missing["nixl"]


def test_what_is_not_there_is_named_before_what_is_turned_off() -> None:
    assert "not installed" in capabilities_of(MachineFacts(), nixl=False).missing["nixl"]


def test_devices_without_a_port_that_is_up_are_named() -> None:
    told = why("rdma", rdma_devices=(), idle_rdma_devices=("mlx5_0", "mlx5_1"))
    assert "mlx5_0, mlx5_1" in told
    assert "ibstat" in told


@pytest.mark.parametrize(
    ("lockable_bytes", "is_missing"), [(None, False), (8 << 20, True), (64 << 30, False)]
)
def test_rdma_needs_to_lock_memory(lockable_bytes: int | None, is_missing: bool) -> None:
    told = why("rdma", lockable_bytes=lockable_bytes)
    assert bool(told) == is_missing
    assert not is_missing or ("8192 KiB" in told and "ulimit -l unlimited" in told)


@pytest.mark.parametrize(
    "ucx_tls", ["", "all", "rc,tcp", "ib,sm,tcp", "dc_mlx5,tcp", "^tcp_x", "^ud", "^sm,rc"]
)
def test_ucx_settings_that_leave_rdma(ucx_tls: str) -> None:
    assert why("rdma", ucx_tls=ucx_tls) == ""


@pytest.mark.parametrize("ucx_tls", ["tcp", "sm,tcp", "cuda_copy,tcp", "^ib", "^all", "^rc,ud,dc"])
def test_ucx_settings_that_leave_out_rdma_are_named(ucx_tls: str) -> None:
    told = why("rdma", ucx_tls=ucx_tls)
    assert f"UCX_TLS={ucx_tls}" in told
    assert "unset it" in told


@pytest.mark.parametrize(("ucx_tls", "is_missing"), [("rc,sm", True), ("^tcp", True), ("sm,tcp", False)])
def test_nixl_needs_tcp_among_the_transports(ucx_tls: str, is_missing: bool) -> None:
    assert ("excludes tcp" in why("nixl", ucx_tls=ucx_tls)) == is_missing


@pytest.mark.parametrize(
    ("devices", "is_missing"),
    [
        ("", False),
        ("all", False),
        ("mlx5_0:1,eth0", False),
        ("eth0", True),
        ("^mlx5_0", True),
        ("^eth0", False),
    ],
)
def test_ucx_net_devices(devices: str, is_missing: bool) -> None:
    told = why("rdma", ucx_net_devices=devices)
    assert bool(told) == is_missing
    assert not is_missing or (f"UCX_NET_DEVICES={devices}" in told and "mlx5_0:1" in told)


def test_capabilities_travel() -> None:
    can = capabilities_of(MachineFacts())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(can), type=PathCapabilities) == can


# --- this machine


def test_memory_can_be_shared_here() -> None:
    assert shared_memory_fault() == ""


def test_missing_memfd_and_proc_have_different_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError(38, "Function not implemented")

    with monkeypatch.context() as patch:
        patch.setattr(machine.os, "memfd_create", refuse)
        assert "no memfd" in shared_memory_fault()
    monkeypatch.setattr(machine.os, "open", refuse)
    assert "/proc" in shared_memory_fault()


def test_rdma_devices_are_found_with_the_state_of_their_ports(tmp_path: Path) -> None:
    for name, state in {"mlx5_0": "4: ACTIVE\n", "mlx5_1": "1: DOWN\n"}.items():
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "state").write_text(state)
    (tmp_path / "mlx5_2" / "ports" / "1" / "state").mkdir(parents=True)  # cannot be read
    assert rdma_devices(tmp_path) == {"mlx5_0": True, "mlx5_1": False, "mlx5_2": False}
    assert rdma_devices(tmp_path / "none") == {}
    facts = probe_machine({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}, infiniband=tmp_path)
    assert (facts.rdma_devices, facts.idle_rdma_devices) == (("mlx5_0",), ("mlx5_1", "mlx5_2"))
    assert (facts.ucx_tls, facts.ucx_net_devices) == ("tcp", "eth0")


def test_the_limit_on_locked_memory_binds_those_without_the_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (65536, 65536))
    status = tmp_path / "status"
    assert lockable_bytes(status) == 65536
    status.write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    assert lockable_bytes(status) == 65536
    status.write_text("CapEff:\t0000000000004000\n")
    assert lockable_bytes(status) is None
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert lockable_bytes(tmp_path / "none") is None
