"""`kvolt worker sleep` and `wake`: which workers they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvolt.api.cluster import ProcessView
from kvolt.cli.main import main
from kvolt.cli.worker.sleep import find_workers
from kvolt.core.errors import ConfigError, NotFound
from kvolt.runtime.process_control import ProcessStatus


def view(name: str, address: str = "host:1", **details: object) -> ProcessView:
    status = ProcessStatus(
        name=name, address="", uptime_s=1.0, connections=0, calls_open=0, endpoints=(), details=details
    )
    return ProcessView(name, address, None, status)


def test_named_workers_or_all_workers_are_meant() -> None:
    workers = [view("w0", engine={}), view("w1", engine={})]
    views = [view("frontend"), *workers, ProcessView("gone", "host:1", None, None)]
    assert find_workers(views, []) == workers
    assert find_workers(views, ["w1"]) == [workers[1]]
    for name in ("frontend", "gone"):
        with pytest.raises(ConfigError, match=f"{name} is no running worker") as caught:
            find_workers(views, [name])
        assert "w0, w1" in str(caught.value.fields["remedy"])
    with pytest.raises(NotFound, match="no process 'w2' is registered; known: frontend, w0, w1, gone"):
        find_workers(views, ["w2"])


def test_a_name_of_several_workers_is_refused() -> None:
    workers = [view("w0", "host:1", engine={}), view("w0", "host:2", engine={})]
    with pytest.raises(NotFound, match="2 processes are named 'w0'; use an address: host:1, host:2"):
        find_workers(workers, ["w0"])
    assert find_workers(workers, ["host:2"]) == [workers[1]]
    assert find_workers(workers, ["host:2", "host:2"]) == [workers[1]]


@pytest.mark.parametrize("verb", ["sleep", "wake"])
def test_without_workers_the_command_is_wrong(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", verb, "--discovery-path", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "kvolt: no worker is running (see `kvolt status`)\n"


@pytest.mark.parametrize("timeout", ["-1", "nan", "inf", "1e6"])
def test_a_wrong_timeout_is_refused(timeout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "sleep", f"--timeout={timeout}", "--discovery-path", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "kvolt: --timeout must be 0 to 86400 (give it in seconds)\n"
