"""The `kvolt` command: picks the verb, loads the config, turns errors into one line and an exit code.

A verb is a module with `HELP`, `configure(parser)` and `run(args, loaded)`. It is imported when it is
chosen and not before, so that help stays fast. A (sub-)verb that must work with a broken config puts a
function of the arguments alone into its parser's defaults as `without_config`.

Exit codes: 0 done, 1 failed, 2 wrong command or config, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvolt import __version__
from kvolt.core.errors import ConfigError, KvoltError

_ALL = (
    "runtime",
    "discovery",
    "plane",
    "events",
    "transfer",
    "admin",
    "log",
    "frontend",
    "router",
    "supervisor",
)
_PROCESS = ("runtime", "discovery", "plane", "events", "admin", "log")
_VISITOR = ("discovery", "plane", "log")


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: its module, help line and group; the section of its short flags, the sections it uses.

    A verb without sections gets no settings flags: its sub-verbs add their own.
    """

    module: str
    help: str
    group: str
    home: str | None = None
    sections: tuple[str, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    """Second words that are verbs of their own, each with its module; any other word is an argument."""


VERBS: dict[str, Verb] = {
    "serve": Verb(
        "kvolt.cli.serve.command",
        "frontend and workers on this machine, kept alive",
        "start",
        "frontend",
        _ALL,
    ),
    "frontend": Verb(
        "kvolt.cli.frontend.command",
        "only the OpenAI-compatible HTTP edge",
        "start",
        "frontend",
        (*_PROCESS, "router", "supervisor"),
    ),
    "router": Verb(
        "kvolt.cli.router.command",
        "only the process that decides for several frontends",
        "start",
        None,
        (*_PROCESS, "router"),
        parts=(("explain", "kvolt.cli.router.explain"),),
    ),
    "worker": Verb(
        "kvolt.cli.worker.command",
        "only one worker, here or joined to another machine",
        "start",
        None,
        (*_PROCESS, "transfer"),
    ),
    "chat": Verb(
        "kvolt.cli.chat.command", "talk to a model, here or behind any OpenAI-compatible URL", "ask"
    ),
    "bench": Verb(
        "kvolt.cli.bench.command", "load on any OpenAI-compatible server, and what its users see", "ask"
    ),
    "status": Verb("kvolt.cli.status", "what is running, and is it ready", "look", None, _VISITOR),
    "top": Verb("kvolt.cli.top", "the same, live", "look", None, _VISITOR),
    "doctor": Verb(
        "kvolt.cli.doctor.command",
        "what this machine has, what it lacks, what to do",
        "look",
        "frontend",
        _ALL,
    ),
    "trace": Verb(
        "kvolt.cli.trace.command", "traces of requests: look into, change, make, find public ones", "look"
    ),
    "cache": Verb("kvolt.cli.cache.command", "KV on this machine's disk: list, check, forget", "look"),
    "model": Verb("kvolt.cli.model", "models on this machine: list, fetch, show", "look"),
    "engine": Verb("kvolt.cli.engine", "engines: what there is, and does one keep the contract", "look"),
    "fit": Verb("kvolt.cli.fit", "a step model from an engine's step log, for the sim engine", "look"),
    "twin": Verb(
        "kvolt.cli.twin.command",
        "a trace through a model of the cluster, on virtual time",
        "look",
        parts=(("sweep", "kvolt.cli.twin.sweep"),),
    ),
    "config": Verb("kvolt.cli.config", "settings: values, origins, checks, names", "look"),
}

_GROUPS = {"start": "Start", "ask": "Ask", "look": "Look"}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KvoltError as error:
        remedy = error.fields.get("remedy")
        print(f"kvolt: {error.message}" + (f" ({remedy})" if remedy else ""), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; without this the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"kvolt {__version__}")
        return 0
    if argv[0].startswith("-"):
        raise ConfigError(f"{argv[0]} comes before a verb", key="verb", remedy="write `kvolt VERB FLAGS`")
    return _run_verb(argv[0], argv[1:])


def _run_verb(name: str, argv: list[str]) -> int:
    from kvolt.cli import flags
    from kvolt.runtime.config.loader import load, nearest

    verb = VERBS.get(name)
    if verb is None:
        raise ConfigError(
            f"unknown verb {name}" + nearest(name, VERBS), key="verb", remedy="see `kvolt --help`"
        )
    module_name = verb.module
    part = dict(verb.parts).get(argv[0]) if argv else None
    if part is not None:
        module_name, name, argv = part, f"{name} {argv[0]}", argv[1:]
    module = importlib.import_module(module_name)
    parser = flags.Parser(prog=f"kvolt {name}", description=module.HELP.strip())
    module.configure(parser)
    sections = getattr(module, "SECTIONS", verb.sections)  # a part may need fewer than its verb
    if sections:
        flags.add_settings(parser, verb.home, sections)
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # --help was printed
        return stop.code if isinstance(stop.code, int) else 0
    without_config = getattr(args, "without_config", None)
    if without_config is not None:
        return int(without_config(args))
    loaded = load(
        environ=os.environ,
        cwd=Path.cwd(),
        file=getattr(args, "config", None),
        overrides=flags.given_overrides(args),
    )
    return int(module.run(args, loaded))


def help_text() -> str:
    lines = [
        "kvolt serves large language models across many machines: an OpenAI-compatible frontend,",
        "a router, and workers that join and leave while it serves.",
        "",
        "Begin with:",
        "  kvolt doctor            is this machine ready?",
        "  kvolt serve             SmolLM2-135M on http://127.0.0.1:8000, or the model you name",
        "  kvolt chat              talk to it",
        "  kvolt status            what is running now",
    ]
    for group, title in _GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<10}{verb.help}" for name, verb in VERBS.items() if verb.group == group]
    lines += [
        "",
        "Next:",
        "  kvolt VERB --help       examples and all flags of a verb",
        "  kvolt config env        every setting; each is also a key of kvolt.toml and a flag",
        "  kvolt --version",
    ]
    return "\n".join(lines)
