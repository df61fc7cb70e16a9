"""What `kvolt doctor` says of paths: those of this machine tried out, others judged by faked facts."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from kvolt.cli.doctor import transfer as doctor_transfer
from kvolt.cli.doctor.transfer import Finding, transfer_findings, tried_finding
from kvolt.core.card import MeasuredLink
from kvolt.core.errors import Unsupported
from kvolt.transfer.agent import TransferOptions
from kvolt.transfer.paths.capabilities import MachineFacts
from kvolt.transfer.reads import self_test

FULL = MachineFacts(nixl_package="nixl_cu12", rdma_devices=("mlx5_0",))


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is tried works."""
    monkeypatch.setattr(
        doctor_transfer, "tried_finding", lambda path, *_: Finding(f"transfer {path}", "ok", "works")
    )


def found(facts: MachineFacts, wants_nixl: bool = False) -> dict[str, Finding]:
    return {each.name.removeprefix("transfer "): each for each in transfer_findings(facts, wants_nixl)}


@pytest.mark.usefixtures("untried")
def test_every_path_is_told() -> None:
    states = {name: finding.state for name, finding in found(FULL).items()}
    assert states == {
        "shm": "ok",
        "tcp": "ok",
        "nixl": "ok",
        "rdma": "untested",
        "nvlink": "untested",
        "gpudirect": "untested",
    }
    assert "mlx5_0" in found(FULL)["rdma"].found


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("facts", "path", "cause", "remedy"),
    [
        ({"rdma_devices": ()}, "rdma", "no RDMA device", "/dev/infiniband"),
        ({"lockable_bytes": 1 << 20}, "rdma", "ulimit -l", "ulimit -l unlimited"),
        ({"ucx_tls": "sm,tcp"}, "rdma", "UCX_TLS=sm,tcp", "unset"),
        ({"ucx_net_devices": "eth0"}, "rdma", "UCX_NET_DEVICES=eth0", "mlx5_0:1"),
        ({"ucx_tls": "rc"}, "nixl", "UCX_TLS=rc", "add tcp"),
        ({"nixl_package": None}, "nixl", "not installed", "pip install --no-deps nixl-cu12==1.5.1"),
        ({"shared_memory_fault": "the kernel has no memfd"}, "shm", "no memfd", "Linux"),
    ],
)
def test_causes_and_remedies_are_named(facts: dict[str, object], path: str, cause: str, remedy: str) -> None:
    finding = found(msgspec.structs.replace(FULL, **facts))[path]
    assert finding.state == "warn"
    assert not finding.blocks
    assert cause in finding.found
    assert remedy in finding.remedy


@pytest.mark.usefixtures("untried")
def test_nixl_that_is_wanted_and_not_installed_keeps_workers_from_starting() -> None:
    without = msgspec.structs.replace(FULL, nixl_package=None)
    assert not found(without)["nixl"].blocks
    assert found(without, wants_nixl=True)["nixl"].blocks
    assert not found(FULL, wants_nixl=True)["nixl"].blocks


@pytest.mark.parametrize(
    ("path", "options"),
    [("shm", TransferOptions(self_test=True)), ("tcp", TransferOptions(self_test=True, shared_memory=False))],
)
def test_a_path_of_this_machine_is_tried_and_nothing_is_said_beside(
    path: str,
    options: TransferOptions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(self_test, "LIMIT_S", 20.0)
    finding = tried_finding(path, options, MachineFacts())
    assert finding.state == "ok"
    assert finding.found.startswith("works: ")
    assert "GB/s" in finding.found
    assert not caplog.records
    assert logging.getLogger("kvolt.transfer").propagate


def test_a_path_that_is_not_taken_is_told_with_what_agents_complained_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def measure(*args: object) -> dict[str, MeasuredLink]:
        logging.getLogger("kvolt.transfer.nixl.path").warning("UCX has only an emulation")
        return {"shm@h": MeasuredLink("shm", 1e9, 0.0)}

    monkeypatch.setattr(doctor_transfer, "_try_once", measure)
    finding = tried_finding("nixl", TransferOptions(), FULL)
    assert (finding.state, finding.found) == ("warn", "does not work: UCX has only an emulation")
    assert "nixl" in finding.remedy


@pytest.mark.parametrize(
    ("error", "told"),
    [(Unsupported("no such thing", feature="x"), "no such thing"), (TimeoutError(), "no answer in time")],
)
def test_a_path_that_fails_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    async def fail(*args: object) -> dict[str, MeasuredLink]:
        raise error

    monkeypatch.setattr(doctor_transfer, "_try_once", fail)
    assert told in tried_finding("shm", TransferOptions(), FULL).found


def test_a_test_that_brought_nothing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{}, {"tcp@h": MeasuredLink("tcp", 1e9, 0.0)}]

    async def measure(*args: object) -> dict[str, MeasuredLink]:
        await asyncio.sleep(0)
        return answers.pop(0)

    monkeypatch.setattr(doctor_transfer, "_try_once", measure)
    assert tried_finding("tcp", TransferOptions(), FULL).state == "ok"
    assert not answers
