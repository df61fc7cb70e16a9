"""The work that every system gets: prompts of words drawn from the model's vocabulary.

Each word is one token, so a prompt has exactly as many tokens as words, and every system is handed the same tokens.
Every sequence of every batch of every round has words of its own: no prefix cache helps anyone.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

_SPACE = "\u0120"
"""How byte-level vocabularies write the space before a word."""
_SHORTEST = 3


def vocabulary_words(folder: Path) -> list[int]:
    """Tokens of the model in `folder` that are a lower-case English-looking word after a space."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(
        token
        for text, token in vocabulary.items()
        if text.startswith(_SPACE) and len(text) > _SHORTEST and _is_word(text.removeprefix(_SPACE))
    )


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalpha() and text.islower()


def prompts(words: list[int], batch: int, length: int, name: str) -> list[list[int]]:
    """A batch of prompts; the same for the same `name`, others for any other."""
    return [random.Random(f"{name}/{batch}/{number}").choices(words, k=length) for number in range(batch)]
