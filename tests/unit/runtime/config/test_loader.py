"""Precedence, origins, the wording of each error, and the way back to TOML."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvolt.core.errors import ConfigError
from kvolt.runtime.config.leaves import leaves, sections, worker_leaves
from kvolt.runtime.config.loader import LoadedConfig, Override, check_file, load, without_settings
from kvolt.runtime.config.settings import Settings, WorkerSettings
from kvolt.runtime.config.toml_writer import to_toml


def load_with(
    cwd: Path, text: str | None = None, env: dict[str, str] | None = None, flags: list[Override] | None = None
) -> LoadedConfig:
    if text is not None:
        (cwd / "kvolt.toml").write_text(text)
    return load(environ={"XDG_RUNTIME_DIR": "/run/user/7", **(env or {})}, cwd=cwd, overrides=flags or [])


def error_of(
    cwd: Path, text: str | None = None, env: dict[str, str] | None = None, flags: list[Override] | None = None
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_with(cwd, text, env, flags)
    assert "\n" not in caught.value.message
    assert caught.value.fields["key"]
    assert caught.value.fields["remedy"]
    return caught.value


def port_flag(text: str) -> list[Override]:
    return [Override("frontend.port", text, "--port")]


# The tree


def test_every_leaf_has_help_and_a_name_of_its_own() -> None:
    assert [key for key, leaf in leaves().items() if not leaf.description] == []
    assert [key for key, leaf in worker_leaves().items() if not leaf.description] == []
    names = [leaf.env for leaf in leaves().values()]
    assert len(set(names)) == len(names)
    assert leaves()["namespace"].env == "KVOLT_NAMESPACE"
    assert leaves()["discovery.join_listen"].env == "KVOLT_DISCOVERY_JOIN_LISTEN"


def test_the_defaults_pass_their_own_limits() -> None:
    assert msgspec.convert(msgspec.to_builtins(Settings()), Settings) == Settings()


def test_every_struct_is_frozen_and_forbids_unknown_fields() -> None:
    for struct in (Settings, WorkerSettings, *sections().values()):
        assert struct.__struct_config__.frozen
        assert struct.__struct_config__.forbid_unknown_fields


# Precedence


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    text = "[frontend]\nport = 1\n"
    env = {"KVOLT_FRONTEND_PORT": "2"}
    seen = [
        load_with(tmp_path),
        load_with(tmp_path, text),
        load_with(tmp_path, text, env),
        load_with(tmp_path, text, env, port_flag("3")),
    ]
    assert [loaded.settings.frontend.port for loaded in seen] == [8000, 1, 2, 3]
    assert [loaded.origins["frontend.port"] for loaded in seen] == [
        "default",
        "file kvolt.toml",
        "env KVOLT_FRONTEND_PORT",
        "flag --port",
    ]


def test_every_key_has_an_origin(tmp_path: Path) -> None:
    text = '[[workers]]\nname = "a"\n'
    default, from_file = load_with(tmp_path), load_with(tmp_path, text)
    assert set(default.origins) >= {*leaves(), "workers.0.count"}
    assert set(default.origins.values()) == {"default"}
    assert from_file.origins["workers.0.name"] == "file kvolt.toml"
    assert from_file.origins["workers.0.count"] == "default"


def test_the_file_is_named_by_flag_then_environment_then_found(tmp_path: Path) -> None:
    for index, name in enumerate(["kvolt.toml", "env.toml", "flag.toml"]):
        (tmp_path / name).write_text(f"[frontend]\nport = {index}\n")
    named = {"KVOLT_CONFIG": "env.toml"}
    assert load(environ={}, cwd=tmp_path).settings.frontend.port == 0
    assert load(environ=named, cwd=tmp_path).settings.frontend.port == 1
    assert load(environ=named, cwd=tmp_path, file="flag.toml").settings.frontend.port == 2


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("KVOLT_ADMIN_ENABLED", "false", False),
        ("KVOLT_ADMIN_ENABLED", "1", True),
        ("KVOLT_PLANE_HEARTBEAT_S", "0.5", 0.5),
        ("KVOLT_PLANE_HEARTBEAT_S", "2", 2.0),
        ("KVOLT_RUNTIME_ADVERTISE", "null", "null"),
        ("KVOLT_RUNTIME_ADVERTISE", "", None),
        ("KVOLT_LOG_LEVEL", "debug", "debug"),
    ],
)
def test_environment_text_becomes_the_right_type(
    tmp_path: Path, name: str, text: str, expected: object
) -> None:
    settings = load_with(tmp_path, env={name: text}).settings
    leaf = next(leaf for leaf in leaves().values() if leaf.env == name)
    assert getattr(getattr(settings, leaf.section or ""), leaf.name) == expected


@pytest.mark.parametrize(
    "key", [key for key, leaf in leaves().items() if leaf.optional and "FloatType" in str(leaf.info)]
)
def test_numbers_that_need_not_be_set_can_be_set_by_text(tmp_path: Path, key: str) -> None:
    leaf = leaves()[key]
    for given in ({"env": {leaf.env: "0.25"}}, {"flags": [Override(key, "0.25", "--x")]}):
        settings = load_with(tmp_path, **given).settings  # type: ignore[arg-type]
        section = settings if leaf.section is None else getattr(settings, leaf.section)
        assert getattr(section, leaf.name) == 0.25


def test_names_of_other_programs_and_the_allowed_ones_pass(tmp_path: Path) -> None:
    env = {"PATH": "/bin", "KVOLT_TRACES": "x", "KVOLT_PEER": "y", "KVOLT_CONFIG": ""}
    assert load_with(tmp_path, env=env).settings == load_with(tmp_path).settings


# Derived values


def test_directories_are_per_user_and_beside_each_other(tmp_path: Path) -> None:
    settings = load_with(tmp_path).settings
    assert settings.discovery.path == "/run/user/7/kvolt/discovery"
    assert settings.supervisor.log_dir == "/run/user/7/kvolt/logs"
    elsewhere = load(environ={"TMPDIR": "/scratch"}, cwd=tmp_path).settings.discovery.path
    assert elsewhere is not None
    assert elsewhere.startswith("/scratch/kvolt-")


def test_logs_are_not_beside_a_discovery_directory_that_was_chosen(tmp_path: Path) -> None:
    flags = [Override("discovery.path", "/tmp/x", "--discovery-path")]
    assert load_with(tmp_path, flags=flags).settings.supervisor.log_dir == "/run/user/7/kvolt/logs"


def test_a_variable_without_its_section_suggests_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean KVOLT_FRONTEND_PORT or"):
        load_with(tmp_path, env={"KVOLT_PORT": "8001"})


def test_paths_are_relative_to_the_place_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "k.toml").write_text(
        '[discovery]\npath = "../found"\n[supervisor]\nlog_dir = "~/logs"\n'
    )
    by_file = load(environ={"HOME": "/home/u"}, cwd=tmp_path, file="etc/k.toml").settings
    assert by_file.discovery.path == str(tmp_path / "found")
    assert by_file.supervisor.log_dir == "/home/u/logs"
    by_env = load(environ={"KVOLT_DISCOVERY_PATH": "here"}, cwd=tmp_path).settings
    assert by_env.discovery.path == str(tmp_path / "here")


def test_join_implies_its_kind(tmp_path: Path) -> None:
    flags = [Override("discovery.join", "10.0.0.1:7400", "--join")]
    loaded = load_with(tmp_path, '[discovery]\nkind = "file"\n', flags=flags)
    assert (loaded.settings.discovery.kind, loaded.settings.discovery.join) == ("join", "10.0.0.1:7400")
    assert loaded.origins["discovery.kind"] == "flag --join"


def test_a_stronger_kind_drops_the_join_of_a_weaker_layer(tmp_path: Path) -> None:
    flags = [Override("discovery.kind", "mem", "--discovery-kind")]
    loaded = load_with(tmp_path, '[discovery]\njoin = "h:1"\n', flags=flags)
    assert (loaded.settings.discovery.kind, loaded.settings.discovery.join) == ("mem", None)
    assert loaded.origins["discovery.join"] == "flag --discovery-kind"


# Errors: where, what, nearest name


A_PORT = "expected a whole number from 0 to 65535"
A_ROLE = "expected one of aggregated, decode, encode, prefill"
A_LEVEL = "expected one of debug, error, info, warning"
SECONDS = "expected a number above 0, at most 604800"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[frontend]\nprot = 1", "frontend.prot: unknown key; did you mean frontend.port?"),
        ("[fronted]\nport = 1", "fronted: unknown key; did you mean frontend?"),
        ("zzzz = 1", "zzzz: unknown key"),
        ("frontend = 1", "frontend: expected a table, got 1"),
        ("workers = 1", "workers: expected a list of tables, got 1"),
        ("[[workers]]\nrole = 'prefil'", f'workers.0.role: {A_ROLE}, got "prefil"; did you mean prefill?'),
        ("[[workers]]\ncuont = 1", "workers.0.cuont: unknown key; did you mean workers.0.count?"),
        ("[[workers]]\ndevices = [1]", "workers.0.devices: expected a list of text, got [1]"),
        (
            "[[workers]]\nargs.day = 2020-01-01",
            "workers.0.args: expected a table without dates, got {'day': datetime.date(2020, 1, 1)}",
        ),
        ("[[workers]]\n[[workers]]", 'workers: duplicate worker name "worker"'),
        ("[frontend]\nport = '1'", f'frontend.port: {A_PORT}, got "1"'),
        ("[frontend]\nport = true", f"frontend.port: {A_PORT}, got true"),
        ("[runtime]\nhost = ''", 'runtime.host: expected text that is not empty, got ""'),
        ("[plane]\nheartbeat_s = nan", f"plane.heartbeat_s: {SECONDS}, got nan"),
        ("[plane]\nheartbeat_s = inf", f"plane.heartbeat_s: {SECONDS}, got inf"),
        ("[plane]\nheartbeat_s = 3", "plane.heartbeat_s: plane.dead_after_s must be above plane.heartbeat_s"),
        ("[discovery]\njoin = 'x'", 'discovery.join: expected HOST:PORT, got "x"'),
        (
            "[discovery]\nkind = 'join'",
            "discovery.kind: discovery.kind=join requires the address of a join server",
        ),
        (
            "[discovery]\nkind = 'mem'\njoin = 'h:1'",
            'discovery.join: discovery.join is set, but discovery.kind is "mem"',
        ),
        ("namespace = 'a/b'", 'namespace: expected letters, digits, - and _, got "a/b"'),
        ("[frontend]\nport 1", "2:6: invalid TOML: Expected '=' after a key in a key/value pair"),
        ("[frontend", "1:10: invalid TOML: Expected ']' at the end of a table declaration"),
    ],
)
def test_errors_of_a_file(tmp_path: Path, text: str, message: str) -> None:
    assert error_of(tmp_path, text).message == f"kvolt.toml:{message}"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("KVOLT_FRONTEND_PROT", "1", "unknown setting; did you mean KVOLT_FRONTEND_PORT?"),
        ("KVOLT_WORKERS_0_COUNT", "1", "workers cannot be set by environment"),
        ("KVOLT_FRONTEND_PORT", "x", f'{A_PORT}, got "x"'),
        ("KVOLT_FRONTEND_PORT", "70000", f'{A_PORT}, got "70000"'),
        ("KVOLT_ADMIN_ENABLED", "maybe", 'expected true or false, got "maybe"'),
        ("KVOLT_LOG_LEVEL", "inof", f'{A_LEVEL}, got "inof"; did you mean info?'),
    ],
)
def test_errors_of_the_environment(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert error_of(tmp_path, env={name: text}).message == f"{name}: {message}"


def test_errors_of_a_flag(tmp_path: Path) -> None:
    error = error_of(tmp_path, flags=port_flag("-1"))
    assert error.message == '--port: expected a whole number from 0 to 65535, got "-1"'
    assert error.fields == {"key": "frontend.port", "remedy": "remove it to use the default, 8000"}


def test_errors_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--config no\.toml: no such file or directory$"):
        load(environ={}, cwd=tmp_path, file="no.toml")
    with pytest.raises(ConfigError, match=r"^KVOLT_CONFIG no\.toml: no such file or directory$"):
        load(environ={"KVOLT_CONFIG": "no.toml"}, cwd=tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'namespace = "\xff"')
    with pytest.raises(ConfigError, match=r"^latin\.toml: not UTF-8 text$"):
        load(environ={}, cwd=tmp_path, file="latin.toml")


def test_check_file_lists_all_problems_and_ignores_the_environment(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("zzzz = 1\n[frontend]\nport = -1\n[log]\nlevel = 5\n")
    environ = {"KVOLT_FRONTEND_PORT": "nonsense"}
    problems = check_file(Path("bad.toml"), environ=environ, cwd=tmp_path)
    assert [problem.fields["key"] for problem in problems] == ["zzzz", "frontend.port", "log.level"]
    (tmp_path / "good.toml").write_text("namespace = 'n'\n")
    assert check_file(Path("good.toml"), environ=environ, cwd=tmp_path) == []


# The way back


def test_a_child_gets_the_resolved_config(tmp_path: Path) -> None:
    environ = {"KVOLT_FRONTEND_PORT": "2", "HOME": "/h", "KVOLT_PEER": "p"}
    parent = load(environ=environ, cwd=tmp_path, overrides=port_flag("3"))
    (tmp_path / "resolved.toml").write_text(to_toml(parent.settings))
    for_child = without_settings(environ)
    assert for_child == {"HOME": "/h", "KVOLT_PEER": "p"}
    assert (
        load(environ=for_child, cwd=Path("/"), file=str(tmp_path / "resolved.toml")).settings
        == parent.settings
    )


@pytest.mark.parametrize(
    "origin", ["*", "http://localhost:3000", "HTTPS://a.example", "http://[::1]:80", "tauri://x"]
)
def test_origins(tmp_path: Path, origin: str) -> None:
    flags = [Override("frontend.cors_origins", f"https://b, {origin}", "--set frontend.cors_origins")]
    loaded = load(environ={}, cwd=tmp_path, overrides=flags)
    assert loaded.settings.frontend.cors_origins == ["https://b", origin]


@pytest.mark.parametrize(
    "origin",
    ["chat.example.com", "https://a/b", "https://a/", "https://", "null", "https://a b", "**", "https://a\n"],
)
def test_texts_that_are_no_origins(tmp_path: Path, origin: str) -> None:
    (tmp_path / "kvolt.toml").write_text(f"[frontend]\ncors_origins = [{json.dumps(origin)}]\n")
    with pytest.raises(ConfigError, match=r"SCHEME://HOST\[:PORT\] or \*"):
        load(environ={}, cwd=tmp_path)
