"""Check that sources and docs use the project's vocabulary (CONTRIBUTING.md, "Words").

    python tools/lint_words.py [PATH ...]      default: all sources and pages

Retired words are looked for in prose (comments, docstrings, strings, Markdown), in the parts of identifiers, and in the
names of locals and parameters. A line that needs one, such as a quoted format of another project, ends with
`# words: ok`; whole files are listed in `ALLOWED_FILES`.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PROSE = {
    "whoever": "name the thing",
    "whomever": "name the thing",
    "somebody": "name the thing",
    "somebody's": "name the thing",
    "nobody": "name the thing",
    "anybody": "any client, any worker, ...",
    "meanwhile": "while ...",
    "brought": "onboarded, fetched, loaded",
    "bring": "onboard, fetch, load",
    "brings": "onboards, fetches, loads",
    "booked": "reserved",
    "bookings": "reservations",
    "telling": "publishing, reporting",
    "tells": "reports, publishes, shows",
}
"""Retired word -> what to write instead."""

IDENTIFIERS = {
    "told": "published, reported, or what the value is",
    "telling": "publisher",
    "brought": "onboarded",
    "booked": "reservation",
    "booking": "reservation",
    "whoever": "the thing itself",
    "somebody": "the thing itself",
    "nobody": "the thing itself",
    "letgo": "release",
    "takeback": "withdraw",
    "unasked": "default",
}

NAMES = {
    "begun": "started (state), or the name of the event",
    "promise": "slo_gate",
    "prices": "costs, cost_model",
    "ledger": "in_flight",
    "neighbours": "peer_workers",
    "crew": "task_group, supervisor",
}
"""Retired in names of Python code only: prose needs these words sometimes."""

LOCALS = {"told", "asked", "given", "found", "said"}
"""Names of locals and parameters that say what happened to a value instead of what it is."""

ALLOWED = "words: ok"
ALLOWED_FILES = {
    "tools/lint_words.py": "lists the words",
    "src/kvolt/engines/sim/model.py": "vocabulary of the simulated model",
    "src/kvolt/bench/load/bodies.py": "vocabulary of generated prompts",
}
_PATHS = (
    *("src", "docs", "benchmarks", "tools", "examples", "deploy"),
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"),
)
_SUFFIXES = {".py", ".md", ".c", ".h"}
_WORDS = "|".join(sorted(map(re.escape, PROSE), key=len, reverse=True))
_PROSE = re.compile(rf"(?<![\w`-])({_WORDS})(?![\w`-])", re.IGNORECASE)
_IDENTIFIER = re.compile(r"(?<![A-Za-z0-9])[A-Za-z_][A-Za-z0-9_]*")
_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def problems(text: str, is_code: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for each retired word."""
    for number, line in enumerate(text.splitlines(), 1):
        if ALLOWED in line:
            continue
        for match in _PROSE.finditer(line):
            yield number, f"'{match[1]}': write {PROSE[match[1].lower()]}"
        if is_code:
            for match in _IDENTIFIER.finditer(line):
                for part in _PART.findall(match[0]):
                    if part.lower() in IDENTIFIERS:
                        yield number, f"{match[0]}: write {IDENTIFIERS[part.lower()]}"


def name_problems(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for each retired name in Python code."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            for part in _PART.findall(token.string):
                if part.lower() in NAMES and ALLOWED not in lines[token.start[0] - 1]:
                    yield token.start[0], f"{token.string}: write {NAMES[part.lower()]}"
    for line, name in _locals(ast.parse(text)):
        if name in LOCALS and ALLOWED not in lines[line - 1]:
            yield line, f"{name}: name what it is"


def _locals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what functions bind."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.lineno, node.id
                elif isinstance(node, ast.arg):
                    yield node.lineno, node.arg


def files(paths: list[str]) -> Iterator[Path]:
    """Yield the tracked files below the paths, without results of benchmarks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        path = Path(name)
        if path.suffix in _SUFFIXES and "results" not in path.parts and path.exists():
            yield path


def main() -> int:
    num_found = 0
    for path in files(sys.argv[1:] or list(_PATHS)):
        if path.as_posix() in ALLOWED_FILES:
            continue
        text = path.read_text("utf-8")
        lines = [
            *problems(text, path.suffix != ".md"),
            *(name_problems(text) if path.suffix == ".py" else ()),
        ]
        for number, problem in sorted(set(lines)):
            num_found += 1
            print(f"{path}:{number}: {problem}")
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main())
