"""The unscripted answer of the simulated model: a pure function of prompt, seed and tokens so far.

A rolling hash over the seed, the prompt and all generated tokens selects the next token, at the cost of one
hash per token. A request resumed with a missing, changed or misplaced token therefore continues with
different text. Tests compute the expected answer with `answer_tokens`, without an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_intdigest

from kvolt.core.hashing import token_bytes

_TOKEN_BYTES = 4


def prompt_state(prompt: Sequence[int], seed: int) -> int:
    """Rolling hash after the prompt."""
    return xxh3_64_intdigest(token_bytes(prompt), seed % 2**64)


def next_state(state: int, token: int) -> int:
    """Rolling hash after one more token."""
    return xxh3_64_intdigest(token.to_bytes(_TOKEN_BYTES, "little"), state)


def answer_tokens(prompt: Sequence[int], seed: int, num_tokens: int, words: Sequence[int]) -> list[int]:
    """The first `num_tokens` tokens of the answer, drawn from `words`."""
    state = prompt_state(prompt, seed)
    answer: list[int] = []
    for _ in range(num_tokens):
        token = words[state % len(words)]
        answer.append(token)
        state = next_state(state, token)
    return answer


def fold(state: int, tokens: Iterable[int]) -> int:
    """Rolling hash after all of `tokens`."""
    for token in tokens:
        state = xxh3_64_intdigest(token.to_bytes(_TOKEN_BYTES, "little"), state)
    return state
