"""Check that sources and docs use the project's vocabulary (CONTRIBUTING.md, "Words").

    python tools/lint_words.py [PATH ...]      default: src, docs, benchmarks, README.md, ARCHITECTURE.md

Retired words are looked for in prose (comments, docstrings, strings, Markdown) and in the parts of identifiers.
A line that needs one, such as a quoted format of another project, ends with `# words: ok`.
"""

from __future__ import annotations

import re
import subprocess
import sys
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

ALLOWED = "words: ok"
_PATHS = ("src", "docs", "benchmarks", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
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
                    if match[0] != part and part.lower() in IDENTIFIERS:
                        yield number, f"{match[0]}: write {IDENTIFIERS[part.lower()]}"


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
        for number, problem in problems(path.read_text("utf-8"), path.suffix != ".md"):
            num_found += 1
            print(f"{path}:{number}: {problem}")
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main())
