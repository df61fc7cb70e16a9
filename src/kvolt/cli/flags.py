"""Command-line parser and the flags for common settings, generated from the config tree.

`GROUPS` lists the settings that have a flag of their own; `--set SECTION.KEY=VALUE` sets any other.
A flag only records its text: `kvolt.runtime.config.loader` validates values and applies defaults.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from kvolt.core.errors import ConfigError
from kvolt.runtime.config.leaves import Leaf, leaves
from kvolt.runtime.config.loader import Override, nearest

GROUPS: dict[str, dict[str, str]] = {
    "HTTP API": {
        "frontend.host": "HOST",
        "frontend.port": "PORT",
        "frontend.processes": "N",
        "frontend.tls_cert": "FILE",
        "frontend.tls_key": "FILE",
        "frontend.tool_parser": "NAME",
        "frontend.reasoning_parser": "NAME",
        "frontend.api_keys": "FILE",
    },
    "routing": {"frontend.router": "POLICY"},
    "disaggregated prefill": {"frontend.prefill_choice": "MODE"},
    "discovery": {
        "namespace": "NAME",
        "discovery.join": "HOST:PORT",
        "discovery.path": "DIR",
        "cluster.key": "FILE",
    },
    "network": {
        "discovery.join_listen": "HOST:PORT",
        "cluster.insecure_network": "",
    },
    "join token": {"cluster.join_token": "TOKEN"},
    "logging": {"log.level": "LEVEL"},
}
"""Settings with a flag: key and placeholder of the value (none: the flag sets it to true), by the title of their group
in `--help`."""

CLIENT_GROUPS = ("discovery", "logging")
"""Groups for commands that query a running cluster."""

_ALIASES = {
    "discovery.join": "--join",
    "cluster.join_token": "--join-token",
    "cluster.insecure_network": "--insecure-network",
}
_MAX_HELP_COLUMNS = 100


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of descriptions; at most 100 columns."""

    def __init__(self, prog: str) -> None:
        columns = min(shutil.get_terminal_size().columns, _MAX_HELP_COLUMNS)
        super().__init__(prog, max_help_position=28, width=columns)


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ConfigError instead of exiting."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        # An unambiguous abbreviation becomes ambiguous when a setting is added.
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # Checked here and not in parse_args, so that a nested parser suggests its own flags.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = next((item for item in unknown if item.startswith("-")), unknown[0]).partition("=")[0]
            if word.startswith("-"):
                self.error(f"unknown flag {word}" + self._suggest_flag(word))
            self.error(f"unexpected argument {word}")
        return parsed, []

    def _suggest_flag(self, word: str) -> str:
        if word in _VLLM_FLAGS and "--arg" in self._option_string_actions:
            field = word.removeprefix("--").replace("-", "_")
            return (
                f"; use --arg {_VLLM_FLAGS[word]} (native engine), or "
                f"--engine vllm --arg engine_args.{field}=VALUE"
            )
        key = _keys_by_flag().get(word)
        if key is not None and "--set" in self._option_string_actions:
            return f"; use --set {key}={'false' if word.startswith('--no-') else 'VALUE'}"
        return nearest(word, self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        match = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        if match:
            choices = re.findall(r"[\w-]+", match[2])
            hint = nearest(match[1], choices) or f"; known: {', '.join(choices)}"
            message = f"unknown choice {match[1]}{hint}"
        verb = self.prog.partition(" ")[2] or self.prog
        raise ConfigError(f"{verb}: {message}", key="flags", remedy=f"see `{self.prog} --help`")


def option(
    parser: argparse._ActionsContainer,
    flag: str,
    metavar: str | None,
    text: str,
    kind: Callable[[str], Any] = str,
    *,
    default: Any = None,
    choices: Iterable[Any] | None = None,
) -> None:
    """Add an option with a value. Its default, if any, is appended to the text."""
    if default is not None:
        text += f" [default: {default:g}]" if isinstance(default, float) else f" [default: {default}]"
    parser.add_argument(flag, metavar=metavar, type=kind, default=default, choices=choices, help=text)


def repeated(parser: argparse._ActionsContainer, flag: str, metavar: str, text: str) -> None:
    """Add an option that may be repeated; its value is a list."""
    text = f"{text.removesuffix('.')}; repeatable."
    parser.add_argument(flag, metavar=metavar, action="append", default=[], help=text)


def switch(parser: argparse._ActionsContainer, flag: str, text: str) -> None:
    """Add an option without a value."""
    parser.add_argument(flag, action="store_true", help=text)


def optional(parser: argparse._ActionsContainer, name: str, metavar: str, text: str) -> None:
    """Add a positional argument that may be omitted."""
    parser.add_argument(name, metavar=metavar, nargs="?", help=text)


class RecordOverride(argparse.Action):
    """Record the text of a setting; the last flag for a setting wins."""

    def __init__(self, *, key: str | None, **kwargs: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, **kwargs)
        self._key = key

    @property
    def known_values(self) -> tuple[str, ...]:
        """Values that a shell can offer; the loader may accept more."""
        return tuple(f"{key}=" for key in leaves()) if self._key is None else leaves()[self._key].choices

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        text = "true" if self.nargs == 0 else str(values)
        key, text = (self._key, text) if self._key is not None else _parse_assignment(values)
        if self._key is None:
            flag = f"{flag} {key}"
        overrides: dict[str, Override] = {**getattr(namespace, "overrides", {})}
        overrides[key] = Override(key, text, flag)
        namespace.overrides = overrides


def _parse_assignment(text: str) -> tuple[str, str]:
    """Key and value of `--set KEY=VALUE`."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if key in leaves():
        if not equals:
            raise ConfigError(f"--set {key} has no value", key=key, remedy=f"write --set {key}=VALUE")
        return key, value
    if key.partition(".")[0] == "workers":
        raise ConfigError(
            f"--set cannot change {key}",
            key="workers",
            remedy="use --engine, --arg or --kv-... flags, or a [[workers]] entry of a config file",
        )
    if key in _OTHER_KEYS:
        raise ConfigError(f"--set: unknown setting {key}", key=key, remedy=_OTHER_KEYS[key])
    similar = [known for known in leaves() if known.rpartition(".")[2] == key]
    similar = similar or difflib.get_close_matches(key, leaves(), n=2, cutoff=0.8)
    hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
    raise ConfigError(
        f"--set: unknown setting {key}{hint}", key=key, remedy="`kvolt config describe` lists all settings"
    )


_OTHER_KEYS = {
    "kv.host": "use --kv-host SIZE",
    "kv.disk": "use --kv-disk SIZE",
    "router.policy": "use --router POLICY, or --set frontend.router=POLICY",
}
"""Keys that look like settings, with what to use instead."""

_VLLM_FLAGS = {
    "--max-model-len": "context_length=VALUE",
    "--tensor-parallel-size": "tensor_parallel=VALUE",
    "--gpu-memory-utilization": "kv_memory_gib=GIB",
    "--max-num-seqs": "max_num_seqs=VALUE",
    "--max-num-batched-tokens": "max_batch_tokens=VALUE",
    "--block-size": "block_size=VALUE",
    "--dtype": "dtype=VALUE",
}
"""Flags of vLLM, with the argument of the native engine that means the same or replaces it."""


def add_settings(parser: argparse.ArgumentParser, groups: Sequence[str], is_listed: bool = True) -> None:
    """Add `--config`, `--set` and the flags of `groups`; the usage line shows only positional arguments.

    `is_listed`: show the flags in `--help`; otherwise it refers to that of `kvolt serve`, which has the same.
    """
    positionals = [action for action in parser._actions if not action.option_strings]
    usage = HelpFormatter(parser.prog)
    usage.add_usage(None, positionals, [])
    parser.usage = usage.format_help().removeprefix("usage:").strip().replace("%", "%%") + " [OPTIONS]"
    parser._actions[0].help = argparse.SUPPRESS  # -h
    general = parser.add_argument_group("configuration")
    # SUPPRESS keeps the value of the parent parser.
    general.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="Default: $KVOLT_CONFIG, else ./kvolt.toml.",
    )
    general.add_argument(
        "--set",
        action=RecordOverride,
        key=None,
        metavar="SECTION.KEY=VALUE",
        help="Set any setting; repeatable. `kvolt config describe` documents all"
        + (
            ", with the flags below."
            if is_listed
            else ". Flags of settings, as in `kvolt serve --help`, work too."
        ),
    )
    for title in groups:
        group = parser.add_argument_group(title)
        add_group(group, title)
        for action in () if is_listed else group._group_actions:
            action.help = argparse.SUPPRESS


def add_group(container: argparse._ActionsContainer, title: str) -> None:
    """Add the flags of one group of settings."""
    for key, metavar in GROUPS[title].items():
        _add_flag(container, leaves()[key], metavar)


def recorded_overrides(args: argparse.Namespace) -> list[Override]:
    """Settings given on the command line."""
    return list(getattr(args, "overrides", {}).values())


def flag_name(key: str) -> str | None:
    """Flag of a setting, if it has one."""
    if not any(key in keys for keys in GROUPS.values()):
        return None
    return _ALIASES.get(key) or "--" + key.removeprefix("frontend.").replace(".", "-").replace("_", "-")


def _keys_by_flag() -> dict[str, str]:
    """Setting of each flag name that its key would give, for suggestions."""
    names: dict[str, str] = {}
    for key in leaves():
        name = key.replace(".", "-").replace("_", "-")
        for each in (name, name.removeprefix("frontend-")):
            names[f"--{each}"] = names[f"--no-{each}"] = key
    return names


def _add_flag(group: argparse._ActionsContainer, leaf: Leaf, metavar: str) -> None:
    name = flag_name(leaf.key)
    assert name is not None
    text, default = leaf.summary, leaf.default
    if default not in (None, "", False) and "Default:" not in text:
        text += f" [default: {default}]"
    group.add_argument(
        name,
        action=RecordOverride,
        key=leaf.key,
        metavar=metavar or None,
        nargs=None if metavar else 0,
        help=text.replace("%", "%%"),
    )
