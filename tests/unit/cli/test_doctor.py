"""Findings from faked facts; ports and directories are real but our own."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvolt.cli import doctor
from kvolt.cli.doctor import GIB, Finding
from kvolt.cli.main import main


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        yield holder.getsockname()[1]


def test_python() -> None:
    assert doctor.python_finding((3, 11, 2)) == Finding("python", "ok", "3.11.2")
    assert doctor.python_finding((3, 10, 9)).blocks


@pytest.mark.parametrize(
    ("total", "allowed", "quota", "state", "found"),
    [
        (8, 8, None, "ok", "8 of 8 usable"),
        (8, 1, None, "warn", "1 of 8 usable"),
        (8, 8, 1.5, "warn", "1.5 of 8 usable"),
        (8, 4, 6.0, "ok", "4 of 8 usable"),
    ],
)
def test_cpu(total: int, allowed: int, quota: float | None, state: str, found: str) -> None:
    finding = doctor.cpu_finding(total, allowed, quota)
    assert (finding.state, finding.found) == (state, found)


def test_memory() -> None:
    assert doctor.memory_finding(8 * GIB, None) == Finding("memory", "ok", "8.0 GiB")
    limited = doctor.memory_finding(8 * GIB, GIB)
    assert (limited.state, limited.found) == ("warn", "1.0 GiB (container limit)")


def test_container_limits(tmp_path: Path) -> None:
    assert (doctor.cpu_quota(tmp_path), doctor.memory_limit(tmp_path)) == (None, None)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1024\n")
    assert (doctor.cpu_quota(tmp_path), doctor.memory_limit(tmp_path)) == (1.5, 1024)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (doctor.cpu_quota(tmp_path), doctor.memory_limit(tmp_path)) == (None, None)


def test_gpu() -> None:
    assert doctor.gpu_finding(["A, 80 GB", "A, 80 GB"]) == Finding("gpu", "ok", "2: A, 80 GB")
    none = doctor.gpu_finding([])
    assert (none.state, none.blocks) == ("warn", False)


def test_package() -> None:
    assert doctor.package_finding("msgspec", "").found == msgspec.__version__
    missing = doctor.package_finding("no-such-package-at-all", "flies")
    assert missing.remedy == "pip install no-such-package-at-all: flies"


@pytest.mark.parametrize(
    ("soft", "hard", "state", "remedy"),
    [
        (8192, 8192, "ok", ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", ""),
        (1024, 65536, "warn", "ulimit -n 8192: "),
        (1024, resource.RLIM_INFINITY, "warn", "ulimit -n 8192: "),
        (1024, 4096, "warn", "raise the hard limit (4096) as root"),
    ],
)
def test_open_files(soft: int, hard: int, state: str, remedy: str) -> None:
    finding = doctor.open_files_finding(soft, hard)
    assert finding.state == state
    assert finding.remedy.startswith(remedy)
    assert bool(finding.remedy) == (state == "warn")


def test_shared_memory() -> None:
    assert doctor.shm_finding(8 * GIB).state == "ok"
    assert "--shm-size" in doctor.shm_finding(GIB // 16).remedy
    assert doctor.shm_finding(None).state == "warn"


def test_port(taken_port: int) -> None:
    taken = doctor.port_finding("frontend port", "127.0.0.1", taken_port, "--port")
    assert (taken.state, taken.blocks) == ("missing", True)
    assert taken.found == f"127.0.0.1:{taken_port}: address already in use"
    assert doctor.port_finding("p", "127.0.0.1", 0, "--port").state == "ok"


def test_directory(tmp_path: Path) -> None:
    uid = os.getuid()
    assert doctor.directory_finding(tmp_path, uid) == Finding("discovery", "ok", str(tmp_path))
    below = tmp_path / "a" / "b"
    assert doctor.directory_finding(below, uid).found == f"{below} (will be created)"
    assert doctor.directory_finding(tmp_path, uid + 1).state == "warn"
    (tmp_path / "file").write_text("")
    blocked = doctor.directory_finding(tmp_path / "file" / "x", uid)
    assert (blocked.state, blocked.blocks) == ("missing", True)


def test_join_server(taken_port: int) -> None:
    assert doctor.join_finding(f"127.0.0.1:{taken_port}").state == "ok"
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        assert doctor.join_finding(f"127.0.0.1:{unheard.getsockname()[1]}").blocks


def test_the_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], taken_port: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "_gpu_names", lambda: ["a gpu"])
    assert main(["doctor", "--json", "--port", "0"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out)
    assert report["ready"]
    assert [row["found"] for row in report["findings"] if row["name"] == "gpu"] == ["1: a gpu"]
    assert main(["doctor", "--port", str(taken_port)]) == 1
    text = capsys.readouterr().out
    assert "choose another with --port" in text
    assert text.splitlines()[-1].startswith("not ready")
