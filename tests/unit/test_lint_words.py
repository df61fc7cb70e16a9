"""The lint of words: names of locals, bare names, and what it allows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[2] / "tools" / "lint_words.py"
_SPEC = importlib.util.spec_from_file_location("lint_words", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
lint_words = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(lint_words)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("told = 1\n", "told: write"),
        ("def tell(x):\n    given = x\n", "given: name what it is"),
        ("lambda asked: asked\n", "asked: name what it is"),
        ("has_begun = True\n", "has_begun: write started"),
        ("# nobody reads it\n", "'nobody': write name the thing"),
    ],
)
def test_retired_words_are_found(text: str, problem: str) -> None:
    problems = [*lint_words.problems(text, True), *lint_words.name_problems(text)]
    assert any(found.startswith(problem) for _, found in problems), problems


@pytest.mark.parametrize(
    "text",
    [
        "told = 1  # words: ok\n",
        "found = 1  # at the module's level, a public name\n",
        "# the neighbours of a token; not found\n",
        "class Finding:\n    found: str\n",
    ],
)
def test_allowed_lines_are_not(text: str) -> None:
    assert not [*lint_words.problems(text, True), *lint_words.name_problems(text)]
