"""Loads the config tree and records the origin of each value.

Precedence, lowest first: defaults, TOML file, environment, flags. Each layer is validated separately, so an error
names the place to change. `environ` and the working directory are arguments; `config.settings` defines the settings.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.runtime.config.conflicts import conflicts
from kvolt.runtime.config.leaves import Leaf, leaves, sections, worker_leaves
from kvolt.runtime.config.settings import Settings, WorkerSettings
from kvolt.runtime.config.toml_writer import literal

ENV_PREFIX = "KVOLT_"
_ENV_DOCUMENTED = ("KVOLT_CONFIG", "KVOLT_HOME", "KVOLT_TRACES")
ENV_OTHER = (*_ENV_DOCUMENTED, "KVOLT_PEER", "KVOLT_READY_FILE", "KVOLT_SUPERVISOR_PID")
"""Variables with the prefix that are not settings."""

DEFAULT_FILE = "kvolt.toml"
_LAYERS = ("default", "file", "env", "flag")
_LIST_NAMES = "`kvolt config describe` lists all settings"


class Override(msgspec.Struct, frozen=True):
    """A setting from the command line: its key, its text, and the flag as typed."""

    key: str
    text: str
    flag: str


class LoadedConfig(msgspec.Struct, frozen=True):
    """The effective settings, and the origin of each dotted key: `default`, `file PATH`, `env NAME` or `flag --x`.

    Keys of a worker entry are `workers.0.name` and so on. `discovery.path` and `supervisor.log_dir` are always set
    and absolute.
    """

    settings: Settings
    origins: dict[str, str]


def load(
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    file: str | None = None,
    overrides: Sequence[Override] = (),
) -> LoadedConfig:
    """Load the configuration; raises ConfigError (fields: key, remedy) for the first problem.

    Environment and working directory are by default those of this process.
    """
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    layers = _Layers(environ)
    path, named_by = _config_path(environ, cwd, file)
    if path is not None:
        layers.apply_file(path, _read_toml(cwd / path, str(path), named_by), cwd)
    layers.apply_environment(cwd)
    layers.apply_flags(overrides, cwd)
    loaded = layers.finish()
    if layers.problems:
        raise layers.problems[0]
    return loaded


def check_file(
    path: Path,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    check_worker: Callable[[WorkerSettings], object] | None = None,
) -> list[ConfigError]:
    """All problems of one file, without environment settings and flags.

    `check_worker` validates a `[[workers]]` entry beyond its types; it raises ConfigError.
    """
    layers = _Layers({name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)})
    try:
        layers.apply_file(path, _read_toml(cwd / path, str(path), ""), cwd)
    except ConfigError as error:
        return [error]
    loaded = layers.finish()
    if check_worker is not None:
        for index, worker in enumerate(loaded.settings.workers):
            try:
                check_worker(worker)
            except ConfigError as error:
                key = f"workers.{index}.{error.fields.get('key') or 'engine'}"
                remedy = str(error.fields.get("remedy") or "correct it")
                layers.problems.append(ConfigError(f"{path}:{key}: {error.message}", key=key, remedy=remedy))
    return layers.problems


def default_discovery_path(environ: Mapping[str, str]) -> str:
    """Default directory of file discovery; its parent belongs to this user."""
    return os.path.join(state_dir(environ), "discovery")


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment for a child process that gets a resolved config file.

    Settings in the environment would override that file, and so the flags of its parent.
    """
    names = {leaf.env for leaf in leaves().values()}
    return {name: value for name, value in environ.items() if name not in names}


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean NAME?` for the most similar known name, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def _nearest_variable(name: str, known: Mapping[str, Leaf]) -> str:
    """Suggest variables whose setting has this name without its section, else the most similar one."""
    same = [each for each, leaf in known.items() if name.removeprefix(ENV_PREFIX) == leaf.name.upper()]
    # The frontend's first: KVOLT_PORT most likely means the port for clients.
    same.sort(key=lambda each: not each.startswith("KVOLT_FRONTEND_"))
    return f"; did you mean {' or '.join(same)}?" if same else nearest(name, [*known, *_ENV_DOCUMENTED])


class _Layers:
    """Merges the layers. Problems are collected, not raised."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._values: dict[str, Any] = {}
        self._workers: list[dict[str, Any]] | None = None
        self._origins: dict[str, str] = dict.fromkeys([*leaves(), "workers"], "default")
        self.problems: list[ConfigError] = []

    def apply_file(self, path: Path, tables: dict[str, Any], cwd: Path) -> None:
        origin, base = f"file {path}", (cwd / path).parent
        for name, value in tables.items():
            if name == "workers":
                self._apply_workers(value, origin)
            elif name not in sections():
                self._apply_file_value(name, value, origin, base)
            elif not isinstance(value, dict):
                problem = f"expected a table, got {_format_value(value)}"
                self._add_problem(origin, name, problem, f"write it as [{name}]")
            else:
                for inner, item in value.items():
                    self._apply_file_value(f"{name}.{inner}", item, origin, base)

    def _apply_file_value(self, key: str, value: Any, origin: str, base: Path) -> None:
        leaf = leaves().get(key)
        if leaf is None:
            self._unknown_key(origin, key, [*leaves(), *sections(), "workers"])
        else:
            self._apply(leaf, value, origin, base)

    def _apply_workers(self, entries: Any, origin: str) -> None:
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            problem = f"expected a list of tables, got {_format_value(entries)}"
            self._add_problem(origin, "workers", problem, "write each entry under a [[workers]] line")
            return
        self._workers, self._origins["workers"] = [], origin
        for index, entry in enumerate(entries):
            worker: dict[str, Any] = {}
            for name in entry:
                if name not in worker_leaves():
                    known = [f"workers.{index}.{known}" for known in worker_leaves()]
                    self._unknown_key(origin, f"workers.{index}.{name}", known)
            for name, leaf in worker_leaves().items():
                key = f"workers.{index}.{name}"
                self._origins[key] = origin if name in entry else "default"
                if name in entry:
                    try:
                        worker[name] = _checked(leaf, entry[name])
                    except ValueError as error:
                        self._add_problem(origin, key, str(error), _remedy(leaf))
            self._workers.append(worker)

    def apply_environment(self, cwd: Path) -> None:
        by_name = {leaf.env: leaf for leaf in leaves().values()}
        for name in sorted(self._environ):
            if not name.startswith(ENV_PREFIX) or name in ENV_OTHER:
                continue
            if name in by_name:
                self._apply(by_name[name], _from_text(by_name[name], self._environ[name]), f"env {name}", cwd)
            elif name.startswith("KVOLT_WORKERS"):
                problem = "workers cannot be set by environment"
                self._add_problem(f"env {name}", "workers", problem, "write [[workers]] in a config file")
            else:
                problem = "unknown setting" + _nearest_variable(name, by_name)
                self._add_problem(f"env {name}", name, problem, _LIST_NAMES)

    def apply_flags(self, overrides: Sequence[Override], cwd: Path) -> None:
        for override in overrides:
            leaf = leaves()[override.key]
            self._apply(leaf, _from_text(leaf, override.text), f"flag {override.flag}", cwd)

    def _apply(self, leaf: Leaf, value: Any, origin: str, base: Path) -> None:
        try:
            value = _checked(leaf, value)
        except ValueError as error:
            self._add_problem(origin, leaf.key, str(error), _remedy(leaf))
            return
        if leaf.extra.get("path") and value is not None:
            value = _absolute(value, base, self._environ)
        self._values[leaf.key], self._origins[leaf.key] = value, origin

    def finish(self) -> LoadedConfig:
        self._resolve_discovery_kind()
        self._fill_directories()
        tree: dict[str, Any] = {name: {} for name in sections()}
        for key, value in self._values.items():
            section, _, name = key.rpartition(".")
            (tree[section] if section else tree)[name] = value
        if self._workers is not None:
            tree["workers"] = self._workers
        settings = msgspec.convert(tree, Settings)
        if self._workers is None:
            default_keys = [
                f"workers.{index}.{name}"
                for index in range(len(settings.workers))
                for name in worker_leaves()
            ]
            self._origins.update(dict.fromkeys(default_keys, "default"))
        for keys, problem, remedy in conflicts(settings):
            # Report the key of the strongest layer, which is probably the one changed last.
            key = max(keys, key=lambda name: _rank(self._origins[name]))
            self._add_problem(self._origins[key], key, problem, remedy)
        return LoadedConfig(settings, self._origins)

    def _resolve_discovery_kind(self) -> None:
        """`join` implies its kind, unless a layer of the same or higher precedence sets another kind."""
        kind, join = self._origins["discovery.kind"], self._origins["discovery.join"]
        if self._values.get("discovery.join") is None or self._values.get("discovery.kind") == "join":
            return
        if _rank(kind) < _rank(join):
            self._values["discovery.kind"], self._origins["discovery.kind"] = "join", join
        elif _rank(kind) > _rank(join):
            self._values["discovery.join"], self._origins["discovery.join"] = None, kind

    def _fill_directories(self) -> None:
        path = self._values.get("discovery.path") or default_discovery_path(self._environ)
        self._values["discovery.path"] = path
        if self._values.get("supervisor.log_dir") is None:
            # Not beside a directory that was chosen: its parent may be shared, as /tmp is.
            self._values["supervisor.log_dir"] = os.path.join(state_dir(self._environ), "logs")

    def _unknown_key(self, origin: str, key: str, known: list[str]) -> None:
        self._add_problem(origin, key, "unknown key" + nearest(key, known), _LIST_NAMES)

    def _add_problem(self, origin: str, key: str, problem: str, remedy: str) -> None:
        self.problems.append(ConfigError(f"{_location(origin, key)}: {problem}", key=key, remedy=remedy))


def _config_path(environ: Mapping[str, str], cwd: Path, file: str | None) -> tuple[Path | None, str]:
    if file is not None:
        return Path(file), "--config "
    if environ.get("KVOLT_CONFIG"):
        return Path(environ["KVOLT_CONFIG"]), "KVOLT_CONFIG "
    return (Path(DEFAULT_FILE), "") if (cwd / DEFAULT_FILE).is_file() else (None, "")


def _read_toml(path: Path, shown: str, named_by: str) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"{named_by}{shown}: {reason}", key="config", remedy="specify a readable TOML file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{shown}: not UTF-8 text", key="config", remedy="specify a TOML file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, position = str(error).partition(" (at ")
        matches = re.match(r"line (\d+), column (\d+)", position)
        # The decoder reports no position if the text ends unexpectedly.
        end = (text.count("\n") + 1, len(text) - text.rfind("\n"))
        line, column = (matches[1], matches[2]) if matches else end
        where = f"{shown}:{line}:{column}"
        raise ConfigError(
            f"{where}: invalid TOML: {reason}", key="config", remedy="correct this line"
        ) from None


_CONVERTED = (msgspec.inspect.IntType, msgspec.inspect.FloatType, msgspec.inspect.BoolType)


def _from_text(leaf: Leaf, text: str) -> Any:
    """Convert the text of a variable or flag; invalid text is returned unchanged for validation."""
    if isinstance(leaf.info, msgspec.inspect.ListType):
        return [item.strip() for item in text.split(",") if item.strip()]
    if leaf.optional and not text:
        return None
    kinds = leaf.info.types if isinstance(leaf.info, msgspec.inspect.UnionType) else (leaf.info,)
    if any(isinstance(kind, _CONVERTED) for kind in kinds):
        try:
            return msgspec.convert(text.strip(), leaf.type, strict=False)
        except msgspec.ValidationError:
            return text
    return text


def _checked(leaf: Leaf, value: Any) -> Any:
    """Validate and convert a value; raises ValueError with the expected values."""
    try:
        checked = msgspec.convert(value, leaf.type)
        if checked is not None:
            literal(checked)  # a value that to_toml cannot write would not reach a child process
    except (msgspec.ValidationError, TypeError):
        hint = nearest(str(value), leaf.choices)
        raise ValueError(f"expected {leaf.expects}, got {_format_value(value)}{hint}") from None
    if leaf.extra.get("address") and checked is not None:
        from kvolt.runtime.network import split_address  # imports asyncio, which most loads do not need

        try:
            split_address(checked)
        except ConfigError:
            raise ValueError(f"expected HOST:PORT, got {_format_value(value)}") from None
    return checked


def _remedy(leaf: Leaf) -> str:
    if leaf.extra.get("address"):
        return "for example 127.0.0.1:7400"
    return (
        "remove it"
        if leaf.default is None
        else f"remove it to use the default, {_format_value(leaf.default)}"
    )


def _absolute(text: str, base: Path, environ: Mapping[str, str]) -> str:
    if text == "~" or text.startswith("~/"):
        text = environ.get("HOME", "~") + text[1:]
    return os.path.normpath(os.path.join(base, text))


def state_dir(environ: Mapping[str, str]) -> str:
    """Runtime directory of this user's processes on this machine."""
    if environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(environ["XDG_RUNTIME_DIR"], "kvolt")
    return os.path.join(environ.get("TMPDIR") or "/tmp", f"kvolt-{os.getuid()}")


def _rank(origin: str) -> int:
    return _LAYERS.index(origin.partition(" ")[0])


def _location(origin: str, key: str) -> str:
    layer, _, name = origin.partition(" ")
    return {"default": key, "file": f"{name}:{key}"}.get(layer, name)


def _format_value(value: Any) -> str:
    try:
        text = "nothing" if value is None else literal(value)
    except TypeError:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
