"""Command-line flags, derived from the config tree.

A verb's home section gives short flags (`--port`), the other sections it uses long ones (`--log-level`).
A flag only records what was typed: checking a value, and every default, is `kvolt.runtime.config.loader`'s work.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.runtime.config.loader import Override, nearest
from kvolt.runtime.config.settings import Leaf, leaves, sections

_ALIASES = {"discovery.join": "--join"}
"""Short names for settings that people type often."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse prints its usage and exits."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # An abbreviation that works today is ambiguous as soon as a setting is added.
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # Checked here and not in parse_args, so that a nested parser offers its own flags.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = next((item for item in unknown if item.startswith("-")), unknown[0]).partition("=")[0]
            if word.startswith("-"):
                self.error(f"unknown flag {word}" + nearest(word, self._option_string_actions))
            self.error(f"unexpected argument {word}")
        return parsed, []

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        if found:
            known = re.findall(r"[\w-]+", found[2])
            hint = nearest(found[1], known) or f"; known: {', '.join(known)}"
            message = f"unknown choice {found[1]}{hint}"
        verb = self.prog.partition(" ")[2] or self.prog
        raise ConfigError(f"{verb}: {message}", key="flags", remedy=f"see `{self.prog} --help`")

    def format_help(self) -> str:
        # Forty settings would drown the usage line; each has its own line in the groups below it.
        own = [action for action in self._actions if not isinstance(action, _Record)]
        if self.usage is not None or len(own) == len(self._actions):
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(None, own, self._mutually_exclusive_groups)
        self.usage = formatter.format_help().removeprefix("usage:").strip() + " [SETTINGS]"
        try:
            return super().format_help()
        finally:
            self.usage = None


class _Record(argparse.Action):
    """Notes a setting as given; the last flag for one setting wins."""

    def __init__(self, *, key: str, text: str | None = None, **kwargs: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, **kwargs)
        self._key = key
        self._text = text

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        text = str(values) if self._text is None else self._text
        given: dict[str, Override] = {**getattr(namespace, "overrides", {})}
        given[self._key] = Override(self._key, text, option_string or self.option_strings[0])
        namespace.overrides = given


def add_settings(parser: argparse.ArgumentParser, home: str | None, used: Sequence[str]) -> None:
    """Add `--config`, `--namespace` and a flag for every leaf of `home` and of the sections `used`."""
    general = parser.add_argument_group("general")
    # SUPPRESS: a nested parser must not put None over what its parent has read.
    general.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML file with settings (default: ./kvolt.toml if there is one; env KVOLT_CONFIG)",
    )
    for name in (None, *([home] if home else []), *(name for name in used if name != home)):
        group = general if name is None else parser.add_argument_group(name, _first_line(sections()[name]))
        for leaf in leaves().values():
            if leaf.section == name:
                _add_leaf(group, leaf, home)


def given_overrides(args: argparse.Namespace) -> list[Override]:
    """What the user typed, and nothing else."""
    return list(getattr(args, "overrides", {}).values())


def flag_name(leaf: Leaf, home: str | None) -> str:
    name = leaf.name if leaf.section in (None, home) else f"{leaf.section}-{leaf.name}"
    return "--" + name.replace("_", "-")


def _add_leaf(group: argparse._ArgumentGroup, leaf: Leaf, home: str | None) -> None:
    flag = flag_name(leaf, home)
    names = [_ALIASES[leaf.key], flag] if leaf.key in _ALIASES else [flag]
    default = "" if leaf.default is None else f"default: {_plain(leaf.default)}; "
    text = f"{leaf.description} ({default}env {leaf.env})".replace("%", "%%")
    if isinstance(leaf.info, msgspec.inspect.BoolType):
        group.add_argument(*names, action=_Record, key=leaf.key, text="true", nargs=0, help=text)
        off = "--no-" + flag.removeprefix("--")
        group.add_argument(
            off, action=_Record, key=leaf.key, text="false", nargs=0, help=f"The opposite of {flag}."
        )
    else:
        group.add_argument(*names, action=_Record, key=leaf.key, metavar=leaf.metavar, help=text)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first_line(struct: type[msgspec.Struct]) -> str:
    return (struct.__doc__ or "").partition("\n")[0]
