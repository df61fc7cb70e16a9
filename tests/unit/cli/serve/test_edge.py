"""The processes of an edge: one, or several with a router and what they share."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvolt.cli.main import main
from kvolt.cli.serve.command import check_shared, child_specs
from kvolt.cli.serve.edge import edge_group, num_edge_processes
from kvolt.cli.serve.readiness import missing
from kvolt.core.errors import ConfigError
from kvolt.frontend.shared_count import SharedCounts
from kvolt.runtime.config.loader import Override, load
from kvolt.runtime.config.settings import Settings, WorkerSettings
from kvolt.runtime.supervisor.plan import ChildState
from kvolt.runtime.supervisor.supervisor import ChildStatus

FRONTEND, WORKERS = Path("/f.toml"), Path("/w.toml")


def settings(*given: str) -> Settings:
    overrides = [Override(key, text, key) for key, _, text in (item.partition("=") for item in given)]
    loaded = load(environ={}, cwd=Path("/"), overrides=overrides).settings
    return replace(loaded, workers=[WorkerSettings(model="sim-tiny", count=2)])


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_a_single_process_shares_nothing(tmp_path: Path) -> None:
    given = settings("frontend.port=0")
    with edge_group(given, tmp_path) as group:
        assert group is None
        assert num_edge_processes(given) == 1
        assert [spec.name for spec in child_specs(given, FRONTEND, WORKERS, group)] == [
            "frontend",
            "worker-0",
            "worker-1",
        ]
    assert list(tmp_path.iterdir()) == []


def test_several_processes_and_their_router(tmp_path: Path) -> None:
    given = settings("frontend.port=0", "frontend.processes=2")
    with edge_group(given, tmp_path) as group:
        specs = {spec.name: spec for spec in child_specs(given, FRONTEND, WORKERS, group)}
        assert list(specs) == ["frontend-0", "frontend-1", "router", "worker-0", "worker-1"]
        http = [specs["frontend-0"], specs["frontend-1"]]
        assert [flag(spec.argv, "--slot") for spec in http] == ["0", "1"]
        assert [flag(spec.argv, "--name") for spec in http] == ["frontend-0", "frontend-1"]
        assert len({flag(spec.argv, "--group") for spec in http}) == 1
        assert {spec.name for spec in specs.values() if spec.stage == 1} == {"frontend-0", "frontend-1"}
        # What only one process can do, listen for others that join, is in the config of the one that there is once.
        configs = {name: flag(spec.argv, "--config") for name, spec in specs.items()}
        assert configs == {name: "/f.toml" if name == "router" else "/w.toml" for name in specs}
        [counts] = {flag(spec.argv, "--counts") for spec in http}
        assert SharedCounts(Path(counts)).num_slots == 2
    assert list(tmp_path.iterdir()) == []


def test_the_places_of_a_dead_process_are_free(tmp_path: Path) -> None:
    def told(name: str, pid: int | None) -> ChildStatus:
        return ChildStatus(name, pid, ChildState.RUNNING if pid else ChildState.BACKOFF, 0, None, None)

    with edge_group(settings("frontend.port=0", "frontend.processes=2"), tmp_path) as group:
        assert group is not None
        counts = SharedCounts(tmp_path / "edge.counts")
        counts.set_count(0, 3)
        counts.set_count(1, 4)
        group.on_event(told("frontend-0", 17))
        group.on_event(told("worker-0", None))
        assert counts.total() == 7
        group.on_event(told("frontend-0", None))
        assert counts.total() == 4


def test_the_port_is_kept_while_all_are_away(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = settings(f"frontend.port={port}", "frontend.processes=2")
    with (
        edge_group(given, tmp_path),
        socket.socket() as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("127.0.0.1", port))


def test_what_several_processes_cannot_share() -> None:
    given = settings("frontend.processes=2", "admin.port=9000")
    with pytest.raises(ConfigError, match="5 processes cannot share a port"):
        check_shared(given)
    with pytest.raises(ConfigError, match="which works within one process only"):
        check_shared(settings("frontend.processes=2", "discovery.kind=mem"))


@pytest.mark.parametrize("number", ["0", "257", "many"])
def test_how_many_there_may_be(number: str) -> None:
    with pytest.raises(ConfigError, match="from 1 to 256"):
        settings(f"frontend.processes={number}")


def test_an_edge_without_workers_waits_for_some() -> None:
    given = settings("frontend.processes=2")
    alone = Settings(frontend=given.frontend, workers=[])
    assert "no worker has joined yet" in missing(alone, {})


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontend", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--processes N" in text
    assert "--slot" not in text
    assert main(["router", "--help"]) == 0
    text = capsys.readouterr().out
    assert "kvolt serve --processes N" in text
    assert "kvolt router --http-port 8100" in text
