"""`kvolt config`: show, describe and check settings."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvolt.cli.flags import GROUPS, add_settings, flag_name, optional, switch
from kvolt.cli.worker.command import check_engine
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.leaves import Leaf, leaves, leaves_of, sections, worker_leaves
from kvolt.runtime.config.loader import LoadedConfig, check_file, nearest
from kvolt.runtime.config.settings import TierSettings, WorkerSettings
from kvolt.runtime.config.toml_writer import to_toml

HELP = """
Show, describe and check settings. Precedence, lowest first: defaults, config file (kvolt.toml),
environment (KVOLT_SECTION_KEY), command line (flags and --set SECTION.KEY=VALUE).

Examples:
  kvolt config describe                 all settings with type, default and documentation
  kvolt config describe router          one section; `workers` and `workers.tiers` are sections too
  kvolt config show                     effective values and their origins
  kvolt config show frontend            one section
  kvolt config show frontend.port       one value
  kvolt config show --toml > my.toml    effective settings as a config file
  kvolt config check my.toml            all errors of a config file
  kvolt config env                      environment variables, keys and defaults as a table
"""

_WIDTH = 100
_MAX_CELL = 56
"""Width of the columns of a table outside a terminal."""


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="show|describe|check|env", required=True, dest="config_verb")
    show = verbs.add_parser("show", help="print effective values and their origins")
    optional(show, "key", "KEY", "Setting or section to show. Default: all.")
    switch(show, "--toml", "Print a config file instead of a table.")
    add_settings(show, tuple(GROUPS), is_listed=False)
    describe = verbs.add_parser("describe", help="print type, default and documentation of settings")
    optional(describe, "key", "SECTION", "Section or setting to describe. Default: all.")
    describe.set_defaults(without_config=_describe)
    check = verbs.add_parser("check", help="print all errors of a config file")
    check.add_argument("file", metavar="FILE")
    check.set_defaults(without_config=_check)
    env = verbs.add_parser("env", help="print environment variables, keys and defaults")
    env.set_defaults(without_config=_env)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    if args.toml:
        if args.key:
            raise ConfigError("--toml prints all settings", key="flags", remedy=f"omit {args.key}")
        sys.stdout.write(to_toml(loaded.settings))
        return 0
    rows = [row for row in value_rows(loaded) if not args.key or (row[0] + ".").startswith(args.key + ".")]
    if not rows:
        raise ConfigError(
            f"unknown key {args.key}" + nearest(args.key, loaded.origins),
            key=args.key,
            remedy="`kvolt config show` lists all keys",
        )
    _print_table(("key", "value", "origin"), rows)
    return 0


def value_rows(loaded: LoadedConfig) -> list[tuple[str, str, str]]:
    """Key, value and origin of every setting, workers last."""
    tree: dict[str, Any] = msgspec.to_builtins(loaded.settings)
    rows = []
    for key, leaf in leaves().items():
        table = tree[leaf.section] if leaf.section else tree
        value = table[leaf.name]
        is_hidden = leaf.extra.get("secret") and value is not None
        rows.append((key, "(secret)" if is_hidden else _shown(value), loaded.origins[key]))
    for index, worker in enumerate(tree["workers"]):
        for name in worker_leaves():
            key = f"workers.{index}.{name}"
            values = (
                {f"{key}.{each}": value for each, value in worker[name].items()} if name == "tiers" else {}
            )
            for shown_key, value in (values or {key: worker[name]}).items():
                rows.append((shown_key, _shown(value), loaded.origins[key]))
    if not tree["workers"]:
        rows.append(("workers", "[]", loaded.origins["workers"]))
    return rows


def _describe(args: argparse.Namespace) -> int:
    topic = args.key or ""
    all_leaves = described_leaves()
    selected = {
        key: leaf for key, leaf in all_leaves.items() if (key + ".").startswith(f"{topic}." if topic else "")
    }
    if not selected:
        names = {*all_leaves, *sections(), "workers", "workers.tiers"}
        raise ConfigError(
            f"unknown section {topic}" + nearest(topic, names),
            key=topic,
            remedy=f"sections: {', '.join([*sections(), 'workers', 'workers.tiers'])}",
        )
    section_types = {**sections(), "workers": WorkerSettings, "workers.tiers": TierSettings}
    section = ""
    for key, leaf in selected.items():
        if leaf.section != section and leaf.section is not None:
            section = leaf.section
            doc = (section_types[section].__doc__ or "").partition("\n")[0]
            print(f"[{section}]  {doc}\n")
        print(key)
        print(_wrapped(leaf.description))
        facts = [leaf.expects, f"default: {_default_text(leaf)}"]
        if key in leaves():
            facts += [f"env: {leaf.env}", *([f"flag: {name}"] if (name := flag_name(key)) else [])]
        print(_wrapped("; ".join(facts)))
        print()
    return 0


def _wrapped(text: str) -> str:
    """Indented lines; flags stay in one piece."""
    return textwrap.fill(
        text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )


def described_leaves() -> dict[str, Leaf]:
    """All settings by key, including those of a `[[workers]]` entry."""
    workers = leaves_of(WorkerSettings, "workers")
    nested = [*workers, *leaves_of(TierSettings, "workers.tiers")]
    return {**leaves(), **{leaf.key: leaf for leaf in nested if leaf.name != "tiers"}}


def _check(args: argparse.Namespace) -> int:
    problems = check_file(
        Path(args.file),
        environ=os.environ,
        cwd=Path.cwd(),
        check_worker=check_engine,
    )
    for problem in problems:
        print(f"{problem.message} ({problem.fields['remedy']})")
    if not problems:
        print(f"{args.file}: ok")
    return 2 if problems else 0


def _env(_args: argparse.Namespace) -> int:
    rows = [(leaf.env, leaf.key, _shown(leaf.default), leaf.description) for leaf in leaves().values()]
    _print_table(("environment", "key", "default", "meaning"), rows)
    return 0


def _default_text(leaf: Leaf) -> str:
    return "not set" if leaf.default is None else _shown(leaf.default) or "empty"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a coloured table on a terminal, aligned plain columns elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*head, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            style = "" if row[-1] != "default" else "dim"
            table.add_row(*(Text(cell, style=style) for cell in row))
        Console().print(table)
        return
    # A long value widens its own line only.
    widths = [min(max(len(row[column]) for row in [head, *rows]), _MAX_CELL) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
