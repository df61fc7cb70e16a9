"""The table of `kvolt status` with names and addresses that look like markup."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from kvolt.api.cluster import ProcessView
from kvolt.cli.main import main
from kvolt.cli.status import picture
from kvolt.core.endpoints import InstanceState
from kvolt.runtime.process_control import EndpointStatus, ProcessStatus


def test_brackets_and_problems_are_shown_as_they_are() -> None:
    status = ProcessStatus(
        name="a", address="", uptime_s=1.0, connections=0, calls_open=0, endpoints=(), details={}
    )
    views = [
        ProcessView("worker[/b]", "[fd00::2]:38593", None, status),
        ProcessView("gone[red]", "[fd00::3]:1", None, None, "cannot connect to [fd00::3]:1: refused"),
    ]
    out = io.StringIO()
    Console(file=out, width=160).print(picture(views))
    lines = out.getvalue().splitlines()
    assert "worker[/b]" in lines[1]
    assert lines[1].rstrip().endswith("[fd00::2]:38593")
    assert "unreachable" in lines[2]
    assert lines[3].rstrip() == (
        "gone[red] at [fd00::3]:1 does not answer: cannot connect to [fd00::3]:1: refused"
    )


def test_what_a_process_without_an_engine_is() -> None:
    for details, kind in (({"pool": {"host": 3}}, "pool"), ({"router": {}}, "router"), ({}, "frontend")):
        status = ProcessStatus(
            name="a", address="", uptime_s=1.0, connections=0, calls_open=0, endpoints=(), details=details
        )
        out = io.StringIO()
        Console(file=out, width=160).print(picture([ProcessView("p", "host:1", None, status)]))
        assert out.getvalue().splitlines()[1].split()[:2] == ["p", kind]


def test_workers_that_routers_pass_over_are_named() -> None:
    worker = EndpointStatus("kvolt.m.generate", "ab12", InstanceState.READY, 0)
    breaker = {"worker": "ab12", "state": "open", "failure_rate": 0.6, "retry_in_s": 3.2}
    views = [
        ProcessView(
            name,
            "host:1",
            None,
            ProcessStatus(
                name=name,
                address="",
                uptime_s=1.0,
                connections=0,
                calls_open=0,
                endpoints=endpoints,
                details=details,
            ),
        )
        for name, endpoints, details in (("edge", (), {"breakers": [breaker]}), ("w0", (worker,), {}))
    ]
    out = io.StringIO()
    Console(file=out, width=160).print(picture(views))
    assert out.getvalue().splitlines()[-1].rstrip() == (
        "breaker open: worker w0 (ab12) is expected to fail 60% of its requests; next probe in 3 s, says edge"
    )


def test_attached_servers_that_are_not_used_are_named() -> None:
    attached = [
        {"url": "http://a:1", "state": "attached", "reason": ""},
        {"url": "http://b:1", "state": "failed", "reason": "no tokenizer"},
    ]
    status = ProcessStatus(
        name="f",
        address="",
        uptime_s=1.0,
        connections=0,
        calls_open=0,
        endpoints=(),
        details={"attached": attached},
    )
    out = io.StringIO()
    Console(file=out, width=160).print(picture([ProcessView("f", "host:1", None, status)]))
    assert [line.rstrip() for line in out.getvalue().splitlines()[2:]] == [
        "server http://b:1 failed: no tokenizer"
    ]


def rows(*views: ProcessView) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=160).print(picture(list(views)))
    return [line.split() for line in out.getvalue().splitlines()]


def frontend(port: int, supervisor_pid: int) -> ProcessView:
    status = ProcessStatus(
        name="frontend",
        address="",
        uptime_s=1.0,
        connections=0,
        calls_open=2,
        endpoints=(),
        supervisor_pid=supervisor_pid,
        details={"router_queue": {"requests": 7, "tokens": 70}},
    )
    return ProcessView("frontend", f"host:{port + 1}", None, status, http=f"127.0.0.1:{port}")


def test_frontends_are_shown_with_queued_requests_and_their_port() -> None:
    assert rows(frontend(8000, 5))[1] == ["frontend", "frontend", "2", "7", "1s", ":8000", "host:8001"]


def test_processes_of_several_serves_are_told_apart() -> None:
    first, second = frontend(8000, 5), frontend(9000, 6)
    assert "serve" not in rows(first, first)[0]
    heads, *found = rows(first, second)
    assert heads[-1] == "serve"
    assert [row[-3:] for row in found] == [[":8000", "host:8001", "5"], [":9000", "host:9001", "6"]]


def test_top_ends_when_q_is_pressed(tmp_path: Path) -> None:
    terminal, side = pty.openpty()
    before = termios.tcgetattr(side)
    command = [sys.executable, "-m", "kvolt", "top", "--interval", "60", "--discovery-path", str(tmp_path)]
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side)
    try:
        shown = b""
        while b"processes" not in shown:
            assert select.select([terminal], [], [], 30)[0], shown
            shown += os.read(terminal, 65536)
        os.write(terminal, b"xq")
        while process.poll() is None:
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 65536)
        assert process.returncode == 0
        assert termios.tcgetattr(side) == before
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(side)


def test_top_without_a_terminal_prints_once_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--discovery-path", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("kvolt default: 0 processes, 0 streams")
