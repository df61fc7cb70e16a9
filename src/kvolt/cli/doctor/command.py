"""`kvolt doctor`: check this machine and its settings, with remedies.

Each `*_finding` function judges given facts, or probes one resource (a port, a directory). `examine` collects the
facts of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvolt.cli.doctor.transfer import Finding, transfer_findings
from kvolt.cli.flags import option, switch
from kvolt.cli.frontends import running_urls
from kvolt.cli.health import base_url, served_models
from kvolt.cli.serve.command import check_shared
from kvolt.cli.serve.worker_groups import with_workers
from kvolt.cli.worker.tiers import disk_folder
from kvolt.core.errors import ConfigError, KvoltError
from kvolt.engines.registry import choose_engine
from kvolt.kv.tiers.sizes import parse_capacity
from kvolt.runtime.config.loader import LoadedConfig, default_discovery_path
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.host.cores import usable_cores
from kvolt.runtime.host.private_directory import untrusted_reason
from kvolt.runtime.network import join_address, split_address
from kvolt.runtime.system_ports import plane_host
from kvolt.transfer.paths.machine import probe_machine

HELP = """
Check whether `kvolt serve` can start on this machine with its settings: packages, hardware, limits, ports,
directories and KV transfer paths, with a remedy for each problem. The last line is what to do next.

Examples:
  kvolt doctor                 all checks as a table
  kvolt doctor --port 9000     check the settings of `kvolt serve --port 9000`
  kvolt doctor --json          for scripts

Exit code: 1 if a problem keeps `kvolt serve` from starting.
"""

GIB = 1024**3
WANTED_OPEN_FILES = 8192
_MARKS = {"ok": "green", "warn": "yellow", "missing": "red", "untested": "cyan"}


def configure(parser: argparse.ArgumentParser) -> None:
    switch(parser, "--json", "Print JSON.")
    option(parser, "--workers", "N", "Number of worker processes to check for.", int)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    findings = examine(with_workers(loaded.settings, args.workers))
    ready = not any(finding.blocks for finding in findings)
    if args.json:
        report = {"ready": ready, "next": next_step(findings), "findings": findings}
        print(msgspec.json.encode(report).decode())
    else:
        _print_findings(findings)
    return 0 if ready else 1


def examine(settings: Settings) -> list[Finding]:
    """Every finding about this machine, for these settings."""
    cgroup = Path("/sys/fs/cgroup")
    shm = Path("/dev/shm")
    discovery = settings.discovery
    gpus = _gpu_names()
    findings = [
        python_finding(sys.version_info[:3]),
        cpu_finding(os.cpu_count() or 1, len(usable_cores())),
        memory_finding(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit(cgroup)),
        gpu_finding(gpus),
        package_finding("uvloop", "pip install uvloop"),
        native_code_finding("router index", _has_native_index(), "several times slower and larger"),
        native_code_finding("block transfer", _has_native_bytes(), "checksums are several times slower"),
        *transfer_findings(probe_machine(os.environ), settings.transfer.nixl),
        *(native_findings(bool(gpus)) if uses_native(settings) else ()),
        open_files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        shm_finding(shutil.disk_usage(shm).total if shm.is_dir() else None),
        *disk_findings(settings),
        *port_findings(settings),
    ]
    if discovery.kind == "file" and discovery.path is not None:
        path = Path(discovery.path)
        is_default = discovery.path == default_discovery_path(os.environ)
        finding = default_finding(path.parent) if is_default else None
        findings.append(finding or directory_finding(path, os.getuid()))
    if discovery.kind == "join" and discovery.join is not None:
        findings.append(join_finding(discovery.join))
    if not any(finding.running for finding in findings):
        findings += cluster_findings(settings)
    return findings


def python_finding(version: tuple[int, ...]) -> Finding:
    shown = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("python", "missing", shown, "install Python 3.11 or newer", blocks=True)
    return Finding("python", "ok", shown)


def cpu_finding(total: int, usable: int) -> Finding:
    shown = f"{usable} of {total} usable"
    if usable < 2:
        return Finding("cpu", "warn", shown, "provide at least 2: frontend and workers share them")
    return Finding("cpu", "ok", shown)


def memory_finding(total_bytes: int, limit_bytes: int | None) -> Finding:
    usable = min(total_bytes, limit_bytes or total_bytes)
    shown = f"{usable / GIB:.1f} GiB" + (" (container limit)" if usable < total_bytes else "")
    if usable < 2 * GIB:
        return Finding("memory", "warn", shown, "a frontend and two workers need more than 2 GiB")
    return Finding("memory", "ok", shown)


def gpu_finding(names: list[str]) -> Finding:
    if not names:
        return Finding("gpu", "warn", "none found", "engines run on the CPU; for a GPU install its driver")
    return Finding("gpu", "ok", f"{len(names)}: " + "; ".join(dict.fromkeys(names)))


def package_finding(package: str, remedy: str) -> Finding:
    """Look up the installed version without importing the package, which takes seconds for torch."""
    try:
        return Finding(package, "ok", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, "missing", "not installed", remedy, blocks=True)


def native_code_finding(name: str, is_native: bool, cost: str) -> Finding:
    """Whether a part uses native code. `cost`: of the code in Python."""
    if is_native:
        return Finding(name, "ok", "native")
    return Finding(name, "warn", "in Python", f"{cost}: install gcc or clang, then reinstall kvolt")


def uses_native(settings: Settings) -> bool:
    return any(choose_engine(group.engine, group.model)[0] == "native" for group in settings.workers)


def native_findings(has_gpu: bool, compilers: Sequence[str] = ("cc", "gcc", "clang")) -> list[Finding]:
    """Requirements of the native engine."""
    findings = [package_finding("torch", "pip install 'kvolt[native]'")]
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is not None:
        findings.append(Finding("c compiler", "ok", compiler))
    elif not has_gpu:
        remedy = "install gcc or clang: compiled CPU kernels halve step times"
        findings.append(Finding("c compiler", "warn", "none found", remedy))
    return findings


def open_files_finding(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= WANTED_OPEN_FILES:
        return Finding("open files", "ok", "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    enough = hard == resource.RLIM_INFINITY or hard >= WANTED_OPEN_FILES
    remedy = (
        f"ulimit -n {WANTED_OPEN_FILES}"
        if enough
        else f"raise the hard limit ({hard}) as root, then ulimit -n"
    )
    return Finding("open files", "warn", f"limit {soft}", f"{remedy}: each connection uses one")


def shm_finding(total_bytes: int | None) -> Finding:
    if total_bytes is None:
        return Finding(
            "/dev/shm", "warn", "not there", "mount a tmpfs on it: engines share memory through it"
        )
    shown = f"{total_bytes / GIB:.1f} GiB"
    if total_bytes < GIB:
        return Finding(
            "/dev/shm", "warn", shown, "docker run --shm-size=8g, or a larger tmpfs: engines share through it"
        )
    return Finding("/dev/shm", "ok", shown)


def disk_findings(settings: Settings) -> Iterator[Finding]:
    """Disk tiers of workers whose size is given in bytes."""
    for group in settings.workers:
        num_bytes = parse_capacity(group.tiers.disk, "tiers.disk").num_bytes if group.tiers.disk else 0
        if not num_bytes:
            continue
        folder = disk_folder(group.tiers.disk_dir)
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        wanted = num_bytes if group.tiers.shared else group.count * num_bytes
        shown = f"{free / GIB:.1f} GiB free in {folder}, {wanted / GIB:.1f} GiB wanted"
        if free < wanted:
            remedy = "reduce --kv-disk: blocks that do not fit are not stored"
            yield Finding("kv disk", "warn", shown, remedy)
        else:
            yield Finding("kv disk", "ok", shown)


def port_findings(settings: Settings) -> list[Finding]:
    """The fixed ports of the processes of `kvolt serve`."""
    frontend, admin, join_listen = settings.frontend, settings.admin, settings.discovery.join_listen
    edge = port_finding("frontend port", frontend.host, frontend.port, "--port")
    url = base_url(frontend)
    models = asyncio.run(served_models(url, 1.0)) if edge.blocks else None
    if models is not None:
        names = ", ".join(models) or "no model"
        shown = f"{join_address(frontend.host, frontend.port)}: a kvolt frontend is running ({names})"
        edge = Finding(edge.name, "ok", shown, "a second `kvolt serve` needs another --port", running=True)
    findings = [edge]
    try:
        check_shared(settings)
    except ConfigError as error:
        remedy = str(error.fields.get("remedy", ""))
        return [*findings, Finding("settings", "missing", error.message, remedy, blocks=True)]
    if admin.enabled and admin.port:
        findings.append(port_finding("admin port", admin.host, admin.port, "--set admin.port=..."))
    if settings.runtime.port:
        host = plane_host(settings)
        findings.append(port_finding("runtime port", host, settings.runtime.port, "--set runtime.port=..."))
    if join_listen is not None:
        findings.append(port_finding("join port", *split_address(join_listen), "--discovery-join-listen"))
    return findings


def port_finding(name: str, host: str, port: int, flag: str) -> Finding:
    """Whether a process can listen on the address now. Port 0 is always free."""
    shown = join_address(host, port)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        remedy = f"choose another port with {flag}, or stop the process that uses it"
        return Finding(name, "missing", f"{shown}: {reason}", remedy, blocks=True)
    return Finding(name, "ok", f"{shown} is free" if port else "any free one")


def directory_finding(path: Path, uid: int) -> Finding:
    """Whether this user can write the directory, or create it in its nearest existing parent."""
    remedy = "choose another with --discovery-path"
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir():
        return Finding("discovery", "missing", f"{existing} is not a directory", remedy, blocks=True)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("discovery", "missing", f"{existing} is not writable", remedy, blocks=True)
    if existing == path and path.stat().st_uid != uid:
        return Finding("discovery", "warn", f"{path} belongs to another user", remedy)
    return Finding("discovery", "ok", str(path) if existing == path else f"{path} (will be created)")


def default_finding(path: Path) -> Finding | None:
    """Finding if the default directory is not private to this user."""
    reason = untrusted_reason(path) if os.path.lexists(path) else None
    remedy = "remove it or `chmod 700` it, or choose another with --discovery-path"
    return Finding("discovery", "missing", f"{path} {reason}", remedy, blocks=True) if reason else None


def join_finding(address: str) -> Finding:
    try:
        socket.create_connection(split_address(address), timeout=2.0).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return Finding(
            "join server", "missing", f"{address}: {reason}", "start it, or correct --join", blocks=True
        )
    return Finding("join server", "ok", f"{address} answers")


def cluster_findings(settings: Settings) -> list[Finding]:
    """Frontends of the namespace that discovery has, at any port. Creates no discovery directory."""
    discovery = settings.discovery
    if discovery.kind == "file" and discovery.path is not None and not Path(discovery.path).exists():
        return []
    try:
        urls = asyncio.run(running_urls(settings))
    except KvoltError:  # another finding reports it
        return []
    if not urls:
        return []
    return [Finding("cluster", "ok", f"a kvolt frontend is running at {', '.join(urls)}", running=True)]


def memory_limit(cgroup: Path) -> int | None:
    limit = _first_line(cgroup / "memory.max")
    return int(limit) if limit.isdecimal() else None


def _has_native_index() -> bool:
    from kvolt.router.index.prefix_index import IS_NATIVE

    return IS_NATIVE


def _has_native_bytes() -> bool:
    from kvolt.transfer.memory.block_bytes import IS_NATIVE

    return IS_NATIVE


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gpu_names() -> list[str]:
    """GPU names by nvidia-smi, or by torch for other vendors."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        command = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return []
        return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    try:
        importlib.metadata.version("torch")
        cuda = importlib.import_module("torch").cuda
    except (importlib.metadata.PackageNotFoundError, ImportError):
        return []
    return [str(cuda.get_device_name(index)) for index in range(cuda.device_count())]


def next_step(findings: Sequence[Finding]) -> str:
    """The one thing to do next."""
    problems = [finding for finding in findings if finding.blocks]
    if problems:
        more = f" ({len(problems) - 1} more above)" if len(problems) > 1 else ""
        first = problems[0]
        return f"{first.remedy or first.found}, for {first.name!r}{more}; then run `kvolt doctor` again"
    if any(finding.running for finding in findings):
        return "`kvolt chat` chats with the kvolt that is running"
    num_warnings = sum(finding.state == "warn" for finding in findings)
    noun = "warning" if num_warnings == 1 else "warnings"
    return "`kvolt serve`" + (
        f" ({num_warnings} {noun} above; none keeps it from starting)" if num_warnings else ""
    )


def _print_findings(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text.assemble(
            (f"{finding.state:<8}", _MARKS[finding.state]), f"  {finding.name:<{width}}  {finding.found}"
        )
        if finding.remedy:
            line.append(f" -> {finding.remedy}", style="dim")
        console.print(line)
    console.print(f"\nnext: {next_step(findings)}", markup=False)
