"""`kvolt engine`: list engines and their arguments; run the conformance suite."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
from importlib.metadata import entry_points

import msgspec
from msgspec.inspect import StructType, type_info

from kvolt.cli.flags import option, optional, repeated
from kvolt.core.errors import ConfigError
from kvolt.core.field_docs import field_texts
from kvolt.engines.registry import GROUP, engine_names, find_engine

HELP = """
List inference engines and run the engine conformance suite. Packages add engines by the entry point group
`kvolt.engines`.

Examples:
  kvolt engine list                       all engines, their arguments and defaults
  kvolt engine list sim                   one engine
  kvolt engine check sim                  run the conformance suite
  kvolt engine check mine --model M --arg dtype=float32 --only events
"""

_CHECKER = "kvolt.testing.engines.check"
_MAX_COLUMN = 20
"""Maximum column width; longer cells shift the rest of their line."""


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="list|check", required=True, dest="engine_verb")
    listing = verbs.add_parser("list", help="list engines and their arguments")
    optional(listing, "engine", "NAME", "Engine to show. Default: all.")
    listing.set_defaults(without_config=_list)
    check = verbs.add_parser("check", help="run the conformance suite, one line per case")
    check.add_argument("engine", metavar="NAME", help="Engine name (`kvolt engine list`).")
    option(check, "--model", None, "Model to serve. Default: the engine's default model.")
    check.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Engine argument; repeatable. VALUE is JSON or a string.",
    )
    repeated(check, "--only", "TEXT", "Run only cases with TEXT in TIER/CASE.")
    option(check, "--ending-prompt", "TEXT", "Prompt with a short answer. Default: found by the suite.")
    option(check, "--timeout", "SECONDS", "Timeout of each wait within a case.", float)
    check.set_defaults(without_config=_check)


def _check(args: argparse.Namespace) -> int:
    """Run the suite in another process, isolated from the engine's side effects."""
    find_engine(args.engine)
    command = [sys.executable, "-m", _CHECKER, args.engine]
    flags = {"--model": args.model, "--ending-prompt": args.ending_prompt, "--timeout": args.timeout}
    command += [f"{flag}={value}" for flag, value in flags.items() if value is not None]
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
        print(f"  default model: {kind.default_model}")
    docs = field_docs(kind.arguments)
    fields = msgspec.structs.fields(kind.arguments)
    rows = [(field.name, _default(field), docs.get(field.name, "")) for field in fields]
    widths = [min(max((len(row[column]) for row in rows), default=0), _MAX_COLUMN) for column in (0, 1)]
    for field_name, default, doc in rows:
        print(f"  {field_name:<{widths[0]}}  {default:<{widths[1]}}  {doc}".rstrip())
    for argument, words in kind.choices.items():
        print(f"  values of {argument}:")
        width = max(map(len, words))
        for word, line in words.items():
            print(f"    {word:<{width}}  {line}".rstrip())


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if value is msgspec.NODEFAULT:
        return "required"
    return msgspec.json.encode(value, enc_hook=repr).decode()


def field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """First sentence about each field: its Meta description, or the string below it in the source."""
    docs = field_texts(kind)
    info = type_info(kind)
    assert isinstance(info, StructType)
    for field in info.fields:
        described = (getattr(field.type, "extra_json_schema", None) or {}).get("description")
        if described:
            docs[field.name] = described
    return {name: " ".join(text.split()).partition(". ")[0].rstrip(".") for name, text in docs.items()}
