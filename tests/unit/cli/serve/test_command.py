"""What `kvolt serve` gives its processes, and what it refuses before any of them starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvolt.cli.main import verb_parser
from kvolt.cli.serve.command import check_shared, child_specs, serve, worker_settings
from kvolt.cli.serve.worker_groups import apply_flags, with_engine_flags, with_model_served, with_workers
from kvolt.cli.worker.command import check_engine
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.loader import Override, load
from kvolt.runtime.config.settings import Settings, WorkerSettings
from kvolt.runtime.config.toml_writer import to_toml


def settings(*given: str) -> Settings:
    overrides = [Override(key, text, key) for key, _, text in (item.partition("=") for item in given)]
    loaded = load(environ={}, cwd=Path("/"), overrides=overrides).settings
    return replace(loaded, workers=[WorkerSettings(model="sim-tiny", count=2)])


def test_only_the_frontend_serves_discovery(tmp_path: Path) -> None:
    given = settings("discovery.join_listen=10.0.0.5:7400")
    workers = worker_settings(given)
    assert workers.discovery.join_listen is None
    assert workers.runtime.host == "10.0.0.5", "other machines would not reach the workers"
    (tmp_path / "w.toml").write_text(to_toml(workers))
    assert load(environ={}, cwd=tmp_path, file="w.toml").settings == workers
    specs = child_specs(given, Path("/f.toml"), Path("/w.toml"))
    configs = {spec.name: spec.argv[spec.argv.index("--config") + 1] for spec in specs}
    assert configs == {"frontend": "/f.toml", "worker-0": "/w.toml", "worker-1": "/w.toml"}


def test_each_worker_keeps_its_adapters_in_a_file_of_its_own() -> None:
    specs = child_specs(settings(), Path("/f.toml"), Path("/w.toml"), loras=Path("/loras"))
    files = {spec.name: spec.argv[spec.argv.index("--lora-state") + 1] for spec in specs[1:]}
    assert files == {"worker-0": "/loras/worker-0.json", "worker-1": "/loras/worker-1.json"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("admin.port=9000", "admin.port is 9000, but 3 processes cannot share a port"),
        ("runtime.port=9000", "runtime.port is 9000, but 3 processes"),
        ("runtime.advertise=a:9000", "runtime.advertise is a:9000, but each of 3 processes has its own port"),
        ("discovery.join_listen=0.0.0.0:7400", "the address of this machine is not set"),
        ("cluster.join_token=kvolt-join-x", "is for one start of one process"),
    ],
)
def test_what_several_processes_cannot_share(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_shared(settings(given))
    assert caught.value.fields["remedy"]


@pytest.mark.parametrize("role", ["--prefill", "--decode", "--aggregated"])
def test_workers_and_a_count_by_role_exclude_each_other(role: str) -> None:
    _, parser, rest = verb_parser(["serve", "sim-tiny", "--workers", "2", role, "1"])
    with pytest.raises(ConfigError, match=f"--workers and {role} are mutually exclusive") as caught:
        apply_flags(settings(), parser.parse_args(rest))
    assert "--aggregated N" in str(caught.value.fields["remedy"])


def test_what_they_can() -> None:
    check_shared(settings())
    check_shared(settings("admin.port=9000", "admin.enabled=false"))
    check_shared(
        settings("discovery.join_listen=0.0.0.0:7400", "runtime.advertise=a", "cluster.insecure_network=true")
    )


def test_number_of_workers() -> None:
    assert [group.count for group in with_workers(settings(), 5).workers] == [5]
    with pytest.raises(ConfigError, match="at least one worker"):
        with_workers(settings(), 0)


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_adapters_are_given_to_the_first_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter(tmp_path / "sql")
    poet = adapter(tmp_path / "poet")
    monkeypatch.chdir(tmp_path)
    group = WorkerSettings(
        model="smollm2-135m", args={"threads": 2, "loras": {"sql": "/old", "kept": "/kept"}}
    )
    given = replace(settings(), workers=[group, WorkerSettings(name="other")])
    found = with_engine_flags(given, [], ["sql=sql", f"poet={poet}", f"a/b={poet}"])
    first, second = found.workers
    assert first.args == {
        "threads": 2,
        "loras": {
            "sql": str(tmp_path / "sql"),  # children may run elsewhere
            "kept": "/kept",
            "poet": str(poet),
            "a/b": str(poet),
        },
    }
    assert second.args == {}
    assert check_engine(first) == ("native", first.args)
    assert with_engine_flags(given, [], []) is given
    (tmp_path / "kvolt.toml").write_text(to_toml(found))
    assert load(environ={}, cwd=tmp_path).settings.workers == found.workers


def test_adapters_that_cannot_be_used_are_told_before_anything_starts(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "sql")
    given = with_model_served(settings(), "smollm2-135m")
    for texts, message in (
        (["sql"], "expected NAME=FOLDER"),
        ([f"={folder}"], "expected NAME=FOLDER"),
        (["sql="], "expected NAME=FOLDER"),
        ([f"sql={tmp_path}"], "has no adapter_config.json"),
        ([f"sql={folder}", f"sql={folder}"], "'sql' is repeated"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            with_engine_flags(given, [], texts)
        assert caught.value.fields["remedy"]
    with pytest.raises(ConfigError, match="require a worker"):
        with_engine_flags(replace(given, workers=[]), [], [f"sql={folder}"])
    simulated = with_engine_flags(settings(), [], [f"sql={folder}"])
    with pytest.raises(ConfigError, match="engine 'sim' has no argument 'loras'"):
        check_engine(simulated.workers[0])


def test_arguments_are_given_to_the_first_workers() -> None:
    group = WorkerSettings(model="smollm2-135m", args={"threads": 2, "block_size": 32})
    given = replace(settings(), workers=[group, WorkerSettings(name="other")])
    first, second = with_engine_flags(given, ["threads=1", "dtype=float32"], []).workers
    assert first.args == {"threads": 1, "block_size": 32, "dtype": "float32"}
    assert second.args == {}
    wrong = with_engine_flags(given, ["no_such=1"], [])
    with pytest.raises(ConfigError, match="no_such"):
        check_engine(wrong.workers[0])


@pytest.mark.parametrize("given", ["frontend.router=nowhere.py:cost", "router.shadow=fastest"])
def test_a_policy_that_does_not_work_is_refused_before_anything_is_started(given: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used|unknown policy"):
        serve(settings(given))
