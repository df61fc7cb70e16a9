"""Findings from faked facts; ports and directories are real but our own."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvolt.cli.doctor import command as doctor
from kvolt.cli.doctor.command import GIB, next_step
from kvolt.cli.doctor.transfer import Finding
from kvolt.cli.main import main
from kvolt.router.index.prefix_index import IS_NATIVE
from kvolt.runtime.config.loader import Override, load
from kvolt.runtime.config.settings import Settings, TierSettings, WorkerSettings
from kvolt.transfer.memory import block_bytes


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        yield holder.getsockname()[1]


@pytest.fixture(autouse=True)
def _paths_are_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("transfer tcp", "ok", "works")
    monkeypatch.setattr(doctor, "transfer_findings", lambda facts, wants_nixl: [finding])


def test_python() -> None:
    assert doctor.python_finding((3, 11, 2)) == Finding("python", "ok", "3.11.2")
    assert doctor.python_finding((3, 10, 9)).blocks


@pytest.mark.parametrize(
    ("total", "usable", "state", "found"),
    [(8, 8, "ok", "8 of 8 usable"), (8, 1, "warn", "1 of 8 usable"), (8, 4, "ok", "4 of 8 usable")],
)
def test_cpu(total: int, usable: int, state: str, found: str) -> None:
    finding = doctor.cpu_finding(total, usable)
    assert (finding.state, finding.found) == (state, found)


def test_memory() -> None:
    assert doctor.memory_finding(8 * GIB, None) == Finding("memory", "ok", "8.0 GiB")
    limited = doctor.memory_finding(8 * GIB, GIB)
    assert (limited.state, limited.found) == ("warn", "1.0 GiB (container limit)")


def test_container_limit(tmp_path: Path) -> None:
    assert doctor.memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("1024\n")
    assert doctor.memory_limit(tmp_path) == 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.memory_limit(tmp_path) is None


def test_gpu() -> None:
    assert doctor.gpu_finding(["A, 80 GB", "A, 80 GB"]) == Finding("gpu", "ok", "2: A, 80 GB")
    none = doctor.gpu_finding([])
    assert (none.state, none.blocks) == ("warn", False)


def test_package() -> None:
    assert doctor.package_finding("msgspec", "").found == msgspec.__version__
    missing = doctor.package_finding("no-such-package-at-all", "pip install it")
    assert missing == Finding(
        "no-such-package-at-all", "missing", "not installed", "pip install it", blocks=True
    )


def test_the_native_engine_is_looked_at_where_it_is_used() -> None:
    settings = load(environ={}, cwd=Path("/"), overrides=[]).settings
    assert doctor.uses_native(settings)
    (worker,) = settings.workers
    of_sim = msgspec.structs.replace(settings, workers=[msgspec.structs.replace(worker, model="sim-tiny")])
    assert not doctor.uses_native(of_sim)
    names = {finding.name for finding in doctor.examine(of_sim)}
    assert "torch" not in names
    assert "torch" in {finding.name for finding in doctor.examine(settings)}


def test_slow_python_code_is_reported() -> None:
    settings = load(environ={}, cwd=Path("/"), overrides=[]).settings
    assert doctor.native_code_finding("router index", True, "slow") == Finding("router index", "ok", "native")
    slow = doctor.native_code_finding("router index", False, "several times slower")
    assert (slow.state, slow.blocks) == ("warn", False)
    assert slow.remedy.startswith("several times slower: install gcc")
    states = {finding.name: finding.found for finding in doctor.examine(settings)}
    assert (states["router index"] == "native", states["block transfer"] == "native") == (
        IS_NATIVE,
        block_bytes.IS_NATIVE,
    )


def test_no_compiler_is_slow_on_a_cpu_only() -> None:
    (_, compiler) = doctor.native_findings(has_gpu=False, compilers=("no-such-compiler",))
    assert (compiler.state, compiler.blocks) == ("warn", False)
    assert len(doctor.native_findings(has_gpu=True, compilers=("no-such-compiler",))) == 1
    assert doctor.native_findings(has_gpu=False, compilers=("sh",))[1].state == "ok"


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


def test_disk_tiers_need_free_space(tmp_path: Path) -> None:
    def states(**tiers: Any) -> list[str]:
        tier_settings = TierSettings(disk_dir=str(tmp_path / "new" / "kv"), **tiers)
        settings = Settings(workers=[WorkerSettings(count=2, tiers=tier_settings)])
        return [finding.state for finding in doctor.disk_findings(settings)]

    free = shutil.disk_usage(tmp_path).free
    assert states() == []
    assert states(disk="1MiB") == ["ok"]
    assert states(disk="4x") == []  # of a device that is not known here
    assert states(disk="4000TiB") == ["warn"]
    assert states(disk=f"{free * 3 // 4}B") == ["warn"]
    assert states(disk=f"{free * 3 // 4}B", shared=True) == ["ok"]


def test_port(taken_port: int) -> None:
    taken = doctor.port_finding("frontend port", "127.0.0.1", taken_port, "--port")
    assert (taken.state, taken.blocks) == ("missing", True)
    assert taken.found == f"127.0.0.1:{taken_port}: address already in use"
    assert doctor.port_finding("p", "127.0.0.1", 0, "--port").state == "ok"


def states(*flags: str) -> dict[str, tuple[str, bool]]:
    overrides = [Override(key, text, key) for key, _, text in (flag.partition("=") for flag in flags)]
    settings = load(environ={}, cwd=Path("/"), overrides=overrides).settings
    return {finding.name: (finding.state, finding.blocks) for finding in doctor.port_findings(settings)}


def test_every_fixed_port_is_checked(taken_port: int) -> None:
    assert states("frontend.port=0") == {"frontend port": ("ok", False)}
    taken = ("missing", True)
    assert states("frontend.port=0", f"discovery.join_listen=127.0.0.1:{taken_port}")["join port"] == taken
    settings = load(
        environ={}, cwd=Path("/"), overrides=[Override("admin.port", str(taken_port), "")]
    ).settings
    alone = msgspec.structs.replace(settings, workers=[])
    assert [finding.name for finding in doctor.port_findings(alone) if finding.blocks] == ["admin port"]
    assert states("frontend.port=0", "runtime.port=9")["settings"] == taken
    assert states("frontend.port=0", "discovery.join_listen=0.0.0.0:7400")["settings"] == taken


def answering(body: bytes, status: int) -> HTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return HTTPServer(("127.0.0.1", 0), Handler)


@pytest.mark.parametrize(
    ("body", "status", "is_kvolt"),
    [
        (b'{"status": "ready", "models": ["m"], "roles": {"m": {"decode": 1, "prefill": 1}}}', 200, True),
        (b'{"status": "no_models", "models": [], "roles": {}}', 503, True),
        (b'{"status": "ok"}', 200, False),
        (b"", 200, False),
        (b"[]", 404, False),
    ],
)
def test_a_port_that_kvolt_holds(body: bytes, status: int, is_kvolt: bool) -> None:
    with answering(body, status) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        overrides = [Override("frontend.port", str(server.server_port), "--port")]
        [finding] = doctor.port_findings(load(environ={}, cwd=Path("/"), overrides=overrides).settings)
        thread.join()
    assert (finding.state, finding.running) == (("ok", True) if is_kvolt else ("missing", False))
    assert ("a kvolt frontend is running" in finding.found) == is_kvolt


def test_a_cluster_on_another_port_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def running_urls(settings: Settings) -> list[str]:
        return ["http://127.0.0.1:18600"]

    monkeypatch.setattr(doctor, "running_urls", running_urls)
    overrides = [Override("discovery.path", str(tmp_path), "--discovery-path")]
    [finding] = doctor.cluster_findings(load(environ={}, cwd=Path("/"), overrides=overrides).settings)
    assert (finding.name, finding.running) == ("cluster", True)
    assert finding.found == "a kvolt frontend is running at http://127.0.0.1:18600"
    assert "kvolt chat" in next_step([finding])


def test_an_unreachable_join_server_is_reported_once() -> None:
    overrides = [Override("discovery.join", "127.0.0.1:1", "--join")]
    assert doctor.cluster_findings(load(environ={}, cwd=Path("/"), overrides=overrides).settings) == []


def test_an_address_that_is_none_is_a_finding() -> None:
    overrides = [Override("frontend.host", "no host", "--host")]
    [finding] = doctor.port_findings(load(environ={}, cwd=Path("/"), overrides=overrides).settings)
    assert (finding.state, finding.blocks) == ("missing", True)


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
    assert [row["found"] for row in report["findings"] if row["name"] == "transfer tcp"] == ["works"]
    assert main(["doctor", "--port", str(taken_port)]) == 1
    text = capsys.readouterr().out
    assert "--port" in text
    assert text.splitlines()[-1] == (
        "next: choose another port with --port, or stop the process that uses it, for 'frontend port'; "
        "then run `kvolt doctor` again"
    )
    assert main(["doctor", "--port", "0", "--workers", "0"]) == 2
    (tmp_path / "kvolt").mkdir()
    (tmp_path / "kvolt").chmod(0o777)
    assert main(["doctor", "--port", "0"]) == 1
    assert "is writable by other users" in capsys.readouterr().out


def test_the_next_step_is_one_thing() -> None:
    fine, slow = Finding("python", "ok", "3.12"), Finding("gpu", "warn", "none found", "install its driver")
    assert next_step([fine]) == "`kvolt serve`"
    assert next_step([fine, slow]) == "`kvolt serve` (1 warning above; none keeps it from starting)"
    running = Finding("frontend port", "ok", "a kvolt frontend is running", running=True)
    assert next_step([fine, running]) == "`kvolt chat` chats with the kvolt that is running"
    torch = Finding("torch", "missing", "not installed", "pip install 'kvolt[native]'", blocks=True)
    port = Finding("frontend port", "missing", "taken", "--port", blocks=True)
    assert next_step([fine, torch, port]) == (
        "pip install 'kvolt[native]', for 'torch' (1 more above); then run `kvolt doctor` again"
    )
