"""`kvolt config`: which settings are in force and why, and is a config file right."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvolt.cli.flags import add_settings
from kvolt.cli.worker.command import check_engine
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.loader import LoadedConfig, check_file, nearest
from kvolt.runtime.config.settings import leaves, sections, worker_leaves
from kvolt.runtime.config.toml_writer import to_toml

HELP = """
Settings come from defaults, a TOML file, the environment and flags; the later wins.

  kvolt config show                     every value and where it came from
  kvolt config show frontend            one section
  kvolt config show frontend.port       one value
  kvolt config show --toml > my.toml    the settings in force, as a file to start from
  kvolt config check my.toml            everything that is wrong with a file
  kvolt config env                      every setting: key, environment name, default, meaning
"""


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="show|check|env", required=True, dest="config_verb")
    show = verbs.add_parser("show", help="values and their origins")
    show.add_argument("key", nargs="?", metavar="KEY", help="a key or a section; all if left out")
    show.add_argument("--toml", action="store_true", help="print a config file instead of a table")
    add_settings(show, None, tuple(sections()))
    check = verbs.add_parser("check", help="everything that is wrong with a file")
    check.add_argument("file", metavar="FILE")
    check.set_defaults(without_config=_check)
    env = verbs.add_parser("env", help="environment names")
    env.set_defaults(without_config=_env)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    if args.toml:
        if args.key:
            raise ConfigError("--toml prints the whole tree", key="flags", remedy=f"leave {args.key} out")
        sys.stdout.write(to_toml(loaded.settings))
        return 0
    rows = [row for row in value_rows(loaded) if not args.key or (row[0] + ".").startswith(args.key + ".")]
    if not rows:
        raise ConfigError(
            f"unknown key {args.key}" + nearest(args.key, loaded.origins),
            key=args.key,
            remedy="`kvolt config show` lists all",
        )
    _print_table(("key", "value", "origin"), rows)
    return 0


def value_rows(loaded: LoadedConfig) -> list[tuple[str, str, str]]:
    """Key, value and origin of every setting, workers last."""
    tree: dict[str, Any] = msgspec.to_builtins(loaded.settings)
    rows = []
    for key, leaf in leaves().items():
        table = tree[leaf.section] if leaf.section else tree
        rows.append((key, _shown(table[leaf.name]), loaded.origins[key]))
    for index, worker in enumerate(tree["workers"]):
        for name in worker_leaves():
            key = f"workers.{index}.{name}"
            rows.append((key, _shown(worker[name]), loaded.origins[key]))
    if not tree["workers"]:
        rows.append(("workers", "[]", loaded.origins["workers"]))
    return rows


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


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A coloured table for people, aligned plain columns for everything else."""
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
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
