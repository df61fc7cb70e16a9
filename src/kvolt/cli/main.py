"""The `kvolt` command: dispatches to a verb, loads the config, and maps errors to a message and an exit code.

A verb is a module with `HELP`, `configure(parser)` and `run(args, loaded)`. It is imported on use, which keeps
`--help` fast. A (sub-)verb that must work with a broken config sets `without_config` in its parser's defaults
to a function of the arguments alone, which takes the place of `run`.

Exit codes: 0 success, 1 failure, 2 invalid command line or config, 130 interrupted.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvolt.core.errors import ConfigError, KvoltError
from kvolt.version import __version__

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from types import ModuleType

_SERVING = ("HTTP API", "routing", "disaggregated prefill")
_PROCESS = ("discovery", "network", "logging")
_SINGLE_PROCESS = ("discovery", "network", "join token", "logging")
_CLIENT = ("discovery", "logging")


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: its module, help line, and the groups of settings (`flags.GROUPS`) that are its flags.

    Sub-verbs of a verb without settings may add their own.
    """

    module: str
    help: str
    category: str
    settings: tuple[str, ...] = ()
    sub_modules: tuple[tuple[str, str], ...] = ()
    """Sub-verbs with a module of their own. Any other second word is an argument."""
    lists_settings: bool = True
    """Whether `--help` lists the flags of the settings."""


VERBS: dict[str, Verb] = {
    "serve": Verb(
        "kvolt.cli.serve.command",
        "start a frontend and workers on this machine and supervise them",
        "start",
        (*_SERVING, *_PROCESS),
    ),
    "frontend": Verb(
        "kvolt.cli.frontend.command",
        "start the OpenAI-compatible HTTP frontend",
        "start",
        (*_SERVING, *_SINGLE_PROCESS),
    ),
    "router": Verb(
        "kvolt.cli.router.command",
        "start a router shared by several frontends, or explain a routing decision",
        "start",
        ("routing", *_SINGLE_PROCESS),
        sub_modules=(("explain", "kvolt.cli.router.explain"),),
    ),
    "worker": Verb(
        "kvolt.cli.worker.command",
        "start one worker, which registers with a local or remote frontend",
        "start",
        _SINGLE_PROCESS,
        sub_modules=(("sleep", "kvolt.cli.worker.sleep"), ("wake", "kvolt.cli.worker.wake")),
    ),
    "cluster": Verb(
        "kvolt.cli.cluster", "create and rotate the key of a cluster; issue certificates", "start"
    ),
    "key": Verb("kvolt.cli.key", "create, list, rotate and revoke API keys of the HTTP API", "start"),
    "chat": Verb("kvolt.cli.chat.command", "chat with a model of any OpenAI-compatible server", "client"),
    "bench": Verb("kvolt.cli.bench.command", "load-test any OpenAI-compatible server", "client"),
    "status": Verb("kvolt.cli.status", "show running processes and their readiness", "inspect", _CLIENT),
    "top": Verb("kvolt.cli.top", "show running processes, refreshed every second", "inspect", _CLIENT),
    "usage": Verb("kvolt.cli.usage", "show requests and tokens of each tenant", "inspect", _CLIENT),
    "doctor": Verb(
        "kvolt.cli.doctor.command",
        "check this machine and its configuration for problems",
        "inspect",
        (*_SERVING, *_PROCESS),
        lists_settings=False,
    ),
    "trace": Verb(
        "kvolt.cli.trace.command", "record, analyze, convert and generate request traces", "inspect"
    ),
    "cache": Verb(
        "kvolt.cli.cache.command", "manage KV caches on disk, in object stores and in pools", "inspect"
    ),
    "model": Verb("kvolt.cli.model", "list, fetch and show models", "inspect"),
    "engine": Verb(
        "kvolt.cli.engine", "list engines and their arguments; run the conformance suite", "inspect"
    ),
    "fit": Verb("kvolt.cli.fit", "fit a step latency model to an engine's step log", "inspect"),
    "twin": Verb(
        "kvolt.cli.twin.command",
        "replay a trace on a simulated cluster under virtual time",
        "inspect",
        sub_modules=(("sweep", "kvolt.cli.twin.sweep"),),
    ),
    "config": Verb("kvolt.cli.config", "show, describe and check settings", "inspect"),
    "completion": Verb("kvolt.cli.completion", "print a completion script for bash, zsh or fish", "inspect"),
}

_OTHER_NAMES = {
    "run": "`kvolt serve MODEL --interactive` serves a model and chats with it; `kvolt chat` chats with a running one",
    "pull": "`kvolt model fetch NAME` downloads a model",
    "list": "`kvolt model list` lists models",
    "ls": "`kvolt model list` lists models",
    "show": "`kvolt model show NAME` shows a model",
    "ps": "`kvolt status` shows what is running",
    "stop": "press Ctrl-C where `kvolt serve` runs, or, if all run on this machine, stop every `kvolt serve`: "
    r"""`kvolt status --json{flags} | grep -oP 'supervisor_pid": \K\d+' | sort -u | xargs -r kill`""",
    "logs": "`kvolt serve` shows them, and writes them to supervisor.log_dir (`kvolt config show`)",
    "rm": "delete its directory, which `kvolt model show NAME` shows",
}
"""Verbs of other tools, such as Ollama's, with the command that does the same."""

_CLUSTER_FLAGS = ("--namespace", "--join", "--discovery-path", "--cluster-key", "--config")

_CATEGORIES = {"start": "Start processes", "client": "Send requests", "inspect": "Inspect and analyze"}


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
        # The reader (`| head`) closed the pipe; this avoids an error message at interpreter exit.
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
        raise ConfigError(f"flag {argv[0]} before the verb", key="verb", remedy="write `kvolt VERB FLAGS`")
    return _run_verb(argv)


def verb_parser(argv: Sequence[str]) -> tuple[ModuleType, ArgumentParser, list[str]]:
    """Module and parser of a command line's verb or sub-verb, and the arguments after it."""
    from kvolt.cli import flags
    from kvolt.runtime.config.loader import nearest

    name, *rest = argv
    verb = VERBS.get(name)
    if verb is None and name in _OTHER_NAMES:
        raise ConfigError(f"no verb {name}", key="verb", remedy=_remedy_for(name, rest))
    if verb is None:
        raise ConfigError(
            f"unknown verb {name}" + nearest(name, VERBS), key="verb", remedy="see `kvolt --help`"
        )
    module_name = verb.module
    sub_module = dict(verb.sub_modules).get(rest[0]) if rest else None
    if sub_module is not None:
        module_name, name, rest = sub_module, f"{name} {rest[0]}", rest[1:]
    module = _import(module_name)
    parser = flags.Parser(prog=f"kvolt {name}", description=module.HELP.strip())
    module.configure(parser)
    groups = getattr(module, "SETTINGS", verb.settings)  # a sub-verb may need fewer than its verb
    if groups:
        flags.add_settings(parser, groups, verb.lists_settings)
    return module, parser, rest


def _remedy_for(name: str, rest: Sequence[str]) -> str:
    """What does the same as another tool's verb; `stop` in the cluster of the given flags."""
    if name != "stop":
        return _OTHER_NAMES[name]
    chosen = [
        " ".join(rest[at : at + (1 if "=" in word else 2)])
        for at, word in enumerate(rest)
        if word.partition("=")[0] in _CLUSTER_FLAGS
    ]
    return _OTHER_NAMES[name].format(flags="".join(f" {each}" for each in chosen))


def _import(name: str) -> ModuleType:
    """Import a verb. The garbage collector would look through ever more modules and find nothing to free."""
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.enable()


def _run_verb(argv: list[str]) -> int:
    from kvolt.cli.flags import recorded_overrides
    from kvolt.runtime.config.loader import load

    module, parser, rest = verb_parser(argv)
    try:
        args = parser.parse_args(rest)
    except SystemExit as stop:  # --help was printed
        return stop.code if isinstance(stop.code, int) else 0
    without_config = getattr(args, "without_config", None)
    if without_config is not None:
        return int(without_config(args))
    loaded = load(
        environ=os.environ,
        cwd=Path.cwd(),
        file=getattr(args, "config", None),
        overrides=recorded_overrides(args),
    )
    return int(module.run(args, loaded))


def help_text() -> str:
    lines = [
        "kvolt serves large language models on one or many machines: an OpenAI-compatible frontend,",
        "a KV-aware router, and workers that can join and leave at any time.",
        "",
        "Get started:",
        "  kvolt doctor            check this machine",
        "  kvolt serve [MODEL]     serve a model (default: SmolLM2-135M) on http://127.0.0.1:8000",
        "  kvolt chat              chat with it",
        "  kvolt status            show what is running",
    ]
    for category, title in _CATEGORIES.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<11}{verb.help}" for name, verb in VERBS.items() if verb.category == category]
    lines += [
        "",
        "More help:",
        "  kvolt VERB --help       examples and flags of a verb",
        "  kvolt config describe   all settings: config file keys, environment variables, defaults",
        "  source <(kvolt completion bash)   complete verbs, flags and values with Tab; also zsh and fish",
        "  kvolt --version",
    ]
    return "\n".join(lines)
