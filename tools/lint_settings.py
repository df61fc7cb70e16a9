"""Check the help of every setting: a unit for each number, the default's meaning where the value does not show it.

    python tools/lint_settings.py

A number has its unit in the name (`_s`, `_bytes`, `_tokens`, ...) or in the help. A setting whose default is unset says
in its help what happens then ("Default: ..."). One or two sentences, with a full stop.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from kvolt.runtime.config.leaves import Leaf, leaves, worker_leaves

_UNIT = re.compile(
    r"(_s|_ms|_us|_bytes|_tokens|_blocks|_seqs|_share|_rate|_limit|port)$"
    r"|^(max|num)_[a-z_]*s$"
)
_UNIT_WORDS = re.compile(
    r"\b(seconds?|milliseconds?|bytes?|GiB|MiB|tokens?|blocks?|requests?|connections?|process(es)?|times?|factor|share|"
    r"number|percent|fraction|weight|ratio|port|threads?|batches|workers?|sessions?|count)\b|[Mm]aximum|0 to 1",
)
_MOST_SENTENCES = 4
"""Besides those that explain a choice, which begin with its name."""


def problems(leaf: Leaf) -> Iterator[str]:
    """Yield what is wrong with the help of one setting."""
    help_text = leaf.description
    if not help_text or not help_text.rstrip().endswith("."):
        yield "help is missing or does not end with a full stop"
    sentences = [each for each in re.split(r"(?<=[.!?])\s+", help_text) if not each.startswith("`")]
    if len(sentences) > _MOST_SENTENCES:
        yield f"help has more than {_MOST_SENTENCES} sentences"
    name = leaf.name
    is_number = isinstance(leaf.default, int | float) and not isinstance(leaf.default, bool)
    if is_number and not _UNIT.search(name) and not _UNIT_WORDS.search(help_text):
        yield "a number without unit, in name or help"
    if leaf.default is None and not re.search(
        r"[Dd]efault|[Uu]nset|[Nn]ot set|[Nn]one|[Ww]ithout", help_text
    ):
        yield "unset by default, and the help does not say what happens then"


def main() -> int:
    num_found = 0
    for key, leaf in {**leaves(), **{f"workers.{k}": v for k, v in worker_leaves().items()}}.items():
        for problem in problems(leaf):
            num_found += 1
            print(f"{key}: {problem}: {leaf.description!r}")
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main())
