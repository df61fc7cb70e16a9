"""Fenced blocks of the documentation: what the tests of README and docs check and run.

Every block has a language. `console`, `bash`, `python` and `toml` blocks are run or loaded, unless a comment before
the fence says why not:

    <!-- not run: needs a GPU -->

Such a block is still checked as far as possible without running it: verbs and flags of `kvolt` exist, make targets
and modules exist, Python compiles and its kvolt imports resolve. In a `console` block lines after a prompt (`$ `) are
commands, all others are their output; `...` stands for any text.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvolt.cli.flags import recorded_overrides
from kvolt.cli.main import verb_parser
from kvolt.cli.worker.command import check_engine
from kvolt.runtime.config.loader import check_file, load

ROOT = Path(__file__).parents[1]
SERVERS = ("serve", "frontend", "worker", "router", "cache serve", "-m kvolt.testing.model_server")
"""Commands that run until they are stopped."""

_CLIENT_VERBS = ("router explain", "worker sleep", "worker wake")
"""Verbs below those of servers that call a running cluster and end."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_REASON = re.compile(r"<!-- not run: ((?:(?!-->).)+?) -->\s*$", re.DOTALL)
_INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
_PROMPT = re.compile(r"^\w*\$ ")
_INLINE = re.compile(r"`(kvolt [^`\n]+)`")
_NUMBER = re.compile(r"\b[0-9a-f]{16}\b|-?\d[\d.,:]*(e-?\d+)?")
_UNIT = re.compile(r"# ?(s|ms|us|µs|min)\b")


@dataclass(frozen=True)
class Command:
    text: str
    output: tuple[str, ...] = ()

    @property
    def verb(self) -> str:
        """Verb of a `kvolt` command."""
        words = " ".join(_words(self.text)[1:])
        return next((verb for verb in SERVERS if f"{words} ".startswith(f"{verb} ")), "")

    @property
    def is_server(self) -> bool:
        words = _words(self.text)
        if words[:1] == ["python"]:
            return self.verb != ""
        return words[:1] == ["kvolt"] and self.verb != "" and " ".join(words[1:3]) not in _CLIENT_VERBS


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    reason: str | None
    """Why it is not run."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[Command]:
        return list(_commands(self.text, prompts=self.language == "console"))


@cache
def pages() -> tuple[Path, ...]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")]
    return tuple(sorted(path for path in found if path.exists()))


@cache
def blocks() -> tuple[Block, ...]:
    return tuple(block for path in pages() for block in _blocks_of(path))


def inline_commands() -> Iterator[tuple[str, str]]:
    """Page and text of each `kvolt` command in running text."""
    for path in pages():
        text = _FENCE.sub("", path.read_text("utf-8"))
        for match in _INLINE.finditer(text):
            yield str(path.relative_to(ROOT)), match[1]


def _blocks_of(path: Path) -> Iterator[Block]:
    text = path.read_text("utf-8")
    for match in _FENCE.finditer(text):
        reason = _REASON.search(text[: match.start()])
        body = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        body = _INCLUDE.sub(lambda include: (ROOT / include[1]).read_text("utf-8"), body)
        line = text.count("\n", 0, match.start()) + 1
        cause = " ".join(reason[1].split()) if reason else None
        yield Block(str(path.relative_to(ROOT)), line, match["language"], body, cause)


def _commands(text: str, prompts: bool) -> Iterator[Command]:
    lines, command, output = iter(text.splitlines()), "", []
    for line in lines:
        if prompts and not _PROMPT.match(line):
            output.append(line)
            continue
        if command:
            yield Command(command, tuple(output))
        command, output = _PROMPT.sub("", line) if prompts else line, []
        while not _is_complete(command):
            command += "\n" + next(lines)
        if not _words(command):
            command = ""
    if command:
        yield Command(command, tuple(output))


def _is_complete(command: str) -> bool:
    if command.endswith("\\"):
        return False
    try:
        _words(command)
    except ValueError:
        return False
    return True


def _words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "), comments=True)


# Checks without running


def check(block: Block, folder: Path) -> None:
    """Raise if a command, name or setting of the block does not exist."""
    match block.language:
        case "console" | "bash":
            for command in block.commands:
                check_command(command.text)
        case "python":
            _check_python(block.text)
        case "toml" if block.reason:
            tomllib.loads(block.text)
        case "toml":
            file = folder / "kvolt.toml"
            file.write_text(block.text)
            problems = check_file(file, environ={}, cwd=folder, check_worker=check_engine)
            assert not problems, problems
        case "json":
            for line in block.text.splitlines():
                json.loads(line)
        case "text" | "mermaid":
            pass
        case other:
            raise AssertionError(f"a block of language {other!r}")


def check_command(text: str) -> None:
    for words in _simple_commands(text):
        match words:
            case ["kvolt", *argv] | ["python", "-m", "kvolt", *argv]:
                _check_kvolt(argv)
            case ["make", target, *assignments]:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
                    f"make {target}"
                )
                for assignment in assignments:
                    name, _, value = assignment.partition("=")
                    if target == "serve" and name == "ARGS":
                        _check_kvolt(["serve", *shlex.split(value)])
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module) is not None, module


def check_inline(text: str) -> None:
    """Verb and flags of a command in running text, whose values may be placeholders."""
    if text.split()[1].startswith(("-", "V")):  # kvolt --help, kvolt VERB --help
        return
    _, parser, rest = verb_parser(text.split()[1:])
    flags = {word.partition("=")[0] for word in rest if word.startswith("--") and not word.endswith("...")}
    assert not flags - _flags_of(parser), f"{text}: unknown flag"


def _flags_of(parser: argparse.ArgumentParser) -> set[str]:
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags |= {flag for sub_parser in action.choices.values() for flag in _flags_of(sub_parser)}
    return flags


def _simple_commands(text: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.wordchars += "[]{}:,@%+!$^"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";|&()<>"):
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words:
                yield [words[0].rpartition("/")[2], *words[1:]]
            words = []
        else:
            words.append(word)


def _check_kvolt(argv: list[str]) -> None:
    if not argv or argv[0] in ("--help", "--version"):
        return
    _, parser, rest = verb_parser(argv)
    args = parser.parse_args(rest)
    load(environ={}, cwd=Path("/"), file=None, overrides=recorded_overrides(args))


def _check_python(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("kvolt"):
                    importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvolt"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


# Output


def missing_output(shown: tuple[str, ...], actual: str) -> list[str]:
    """Shown lines that the actual output has not; numbers, ids, units of time and spaces may differ."""
    lines = [_shape(line) for line in actual.splitlines()]
    return [line for line in shown if not any(_pattern(line).fullmatch(each) for each in lines)]


def _pattern(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(_shape(part)) for part in line.split("...")))


def _shape(line: str) -> str:
    return _UNIT.sub("# s", _NUMBER.sub("#", " ".join(line.split())))
