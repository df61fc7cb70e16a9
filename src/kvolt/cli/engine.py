"""`kvolt engine`: which engines there are and what they take; does one keep the contract."""

from __future__ import annotations

import argparse
import ast
import inspect
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Any

import msgspec
from msgspec.inspect import StructType, type_info

from kvolt.core.errors import ConfigError
from kvolt.engines.registry import GROUP, engine_names, find_engine
from kvolt.runtime.config.loader import LoadedConfig

HELP = """
Engines compute. kvolt brings some; a package adds its own under the entry point group `kvolt.engines`.

  kvolt engine list                       engines, their arguments with defaults
  kvolt engine list sim                   one of them
  kvolt engine check sim                  run an engine through the conformance suite
  kvolt engine check mine --model M --arg dtype=float32 --only events
"""

_CHECKER = "kvolt.testing.engines.check"
_WIDEST = 20
"""Of a column: what is wider moves the rest of its line."""


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="list|check", required=True, dest="engine_verb")
    listing = verbs.add_parser("list", help="engines and their arguments")
    listing.add_argument("engine", nargs="?", metavar="NAME", help="only this one")
    listing.set_defaults(without_config=_list)
    check = verbs.add_parser("check", help="does an engine keep the contract: one line per case")
    check.add_argument("engine", metavar="NAME", help="an engine of `kvolt engine list`")
    check.add_argument("--model", help="model to serve (default: the engine's own)")
    check.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="engine argument; VALUE is JSON or a word",
    )
    check.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only cases with TEXT in TIER/CASE"
    )
    check.add_argument(
        "--ending-prompt", metavar="TEXT", help="a prompt that is answered shortly (default: looked for)"
    )
    check.add_argument("--timeout", type=float, metavar="SECONDS", help="longest wait within a case")
    check.set_defaults(without_config=_check)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    raise AssertionError("every verb of `kvolt engine` works without a config")


def _check(args: argparse.Namespace) -> int:
    """In another process: the suite is no part of what serves, and an engine may do as it likes there."""
    find_engine(args.engine)
    command = [sys.executable, "-m", _CHECKER, args.engine]
    given = {"--model": args.model, "--ending-prompt": args.ending_prompt, "--timeout": args.timeout}
    command += [f"{flag}={value}" for flag, value in given.items() if value is not None]
    command += [f"--arg={text}" for text in args.arg]
    command += [f"--only={text}" for text in args.only]
    return subprocess.run(command, check=False).returncode


def _list(args: argparse.Namespace) -> int:
    if args.engine is not None:
        find_engine(args.engine)  # an unknown name lists the known ones
    packages = {point.name: point.value for point in entry_points(group=GROUP)}
    names = [args.engine] if args.engine is not None else engine_names()
    for index, name in enumerate(names):
        if index:
            print()
        _show(name, packages.get(name))
    return 0


def _show(name: str, package: str | None) -> None:
    try:
        kind = find_engine(name)
    except ConfigError as error:
        remedy = error.fields.get("remedy")
        print(f"{name}: {error.message}" + (f" ({remedy})" if remedy else ""))
        return
    about = (inspect.getdoc(kind.arguments) or "").partition("\n")[0]
    print(f"{name}" + (f" ({package})" if package else "") + (f": {about}" if about else ""))
    if kind.default_model is not None:
        print(f"  model {kind.default_model} unless another is named")
    docs = field_docs(kind.arguments)
    fields = msgspec.structs.fields(kind.arguments)
    rows = [(field.name, _default(field), docs.get(field.name, "")) for field in fields]
    widths = [min(max((len(row[column]) for row in rows), default=0), _WIDEST) for column in (0, 1)]
    for field_name, default, doc in rows:
        print(f"  {field_name:<{widths[0]}}  {default:<{widths[1]}}  {doc}".rstrip())
    for argument, words in kind.choices.items():
        print(f"  {argument} is one of")
        width = max(map(len, words))
        for word, line in words.items():
            print(f"    {word:<{width}}  {line}".rstrip())


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if value is msgspec.NODEFAULT:
        return "required"
    return msgspec.json.encode(value, enc_hook=repr).decode()


def field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The first line about each field: its Meta's description, or the string below it in the source."""
    docs = dict(_source_docs(kind))
    info = type_info(kind)
    assert isinstance(info, StructType)
    for field in info.fields:
        described = (getattr(field.type, "extra_json_schema", None) or {}).get("description")
        if described:
            docs[field.name] = described
    return {name: " ".join(text.split()).partition(". ")[0].rstrip(".") for name, text in docs.items()}


def _source_docs(kind: type[msgspec.Struct]) -> list[tuple[str, str]]:
    try:
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return []
    body = tree.body[0].body
    return [
        (field.target.id, str(below.value.value))
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    ]
