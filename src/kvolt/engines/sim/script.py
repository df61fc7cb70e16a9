"""Content of simulated answers: a scripted text, or generated words.

A token is a function of the request, its seed and all tokens before it: a rolling hash over them selects the next one,
at the cost of one hash per token. So an answer resumed with the right tokens continues unchanged; a missing, changed or
misplaced token, or wrong KV, changes it. Tests compute the expected answer with `answer_tokens`, without an engine.
Knows no scheduling: the engine requests one token at a time and ends the answer.

A script is a text that is reproduced exactly, tokenized by the model's tokenizer, then EOS. Names of special tokens
in it are encoded as plain text: as special tokens they would be removed from the answer, and EOS would end it. If EOS
is not possible (`ignore_eos`, fewer than `min_tokens` so far), generated words follow.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import xxhash

from kvolt.core.delta import TokenLogprobs
from kvolt.core.errors import InvalidRequest
from kvolt.core.hashing import token_bytes
from kvolt.core.request import Request
from kvolt.engines.sim.model import SimModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OPEN, OR, CLOSE = "<say>", "<or/>", "</say>"
MAX_LOGPROBS = 20
"""Most alternatives per token, as in most engines; bounds the size of an answer."""

_NEVER = sys.maxsize
_CHOICE_STEP = 0x9E3779B97F4A7C15
_LOGPROBS_SALT = 0xA5A5A5A5A5A5A5A5

_Script = tuple[int, ...]


def prompt_state(prompt: Sequence[int], seed: int) -> int:
    """Rolling hash after the prompt."""
    return xxhash.xxh3_64_intdigest(token_bytes(prompt), seed % 2**64)


def next_state(state: int, token: int) -> int:
    """Rolling hash after one more token."""
    return xxhash.xxh3_64_intdigest(token.to_bytes(4, "little"), state)


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
        state = xxhash.xxh3_64_intdigest(token.to_bytes(4, "little"), state)
    return state


class Choice:
    """One answer to a request. Immutable; the caller tracks its position."""

    __slots__ = (
        "_alternatives",
        "_eos",
        "_eos_at",
        "_num_logprobs",
        "_script",
        "_words",
        "seed",
    )

    def __init__(
        self,
        model: SimModel,
        request: Request,
        seed: int,
        script: _Script | None,
        num_words: int | None,
    ) -> None:
        stop, sampling = request.stop, request.sampling
        self.seed = seed
        self._alternatives = model.words
        self._words = model.words if sampling.allowed_token_ids is None else sampling.allowed_token_ids
        self._num_logprobs = sampling.logprobs
        self._script = script or ()
        self._eos = model.card.eos_token_ids[0]
        length = num_words if script is None else len(script)
        can_end = not stop.ignore_eos or self._eos in stop.stop_token_ids
        ends_with_eos = length is not None and can_end
        self._eos_at = max(length or 0, stop.min_tokens) if ends_with_eos else _NEVER

    def token(self, position: int, state: int, corruption: int = 0) -> int:
        """The token at `position` after a token history with hash `state`. Wrong KV (`corruption`) changes it."""
        if corruption:
            return self._words[(state ^ corruption) % len(self._words)]
        if position < len(self._script):
            return self._script[position]
        if position >= self._eos_at:
            return self._eos
        return self._words[state % len(self._words)]

    def logprobs(self, position: int, token: int) -> TokenLogprobs | None:
        if self._num_logprobs is None:
            return None
        digest = xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), self.seed ^ _LOGPROBS_SALT)
        return _synthetic_logprobs(token, self._num_logprobs, self._alternatives, digest)


class AnswerScripts:
    """Determines the answers to requests. One per engine."""

    def __init__(
        self,
        model: SimModel,
        text: str | None,
        from_prompt: bool,
        num_words: int | None = None,
        reads_prompts: bool = True,
    ) -> None:
        """`reads_prompts`: False for trace prompts, whose tokens are unknown and cannot be checked."""
        self._reads_prompts = reads_prompts
        self._model = model
        self._num_words = num_words
        self._tokenizer = _tokenizer(model) if text is not None or from_prompt else None
        self._from_prompt = from_prompt
        self._default = None if text is None else (self._encode(text),)

    def choices(self, request: Request) -> list[Choice]:
        """The choices of a request. InvalidRequest if no answer can satisfy it."""
        self._check(request)
        base = request.sampling.seed
        if base is None or self._reads_prompts:
            digest = xxhash.xxh3_64_intdigest(token_bytes(request.token_ids))
            base = digest if base is None else base
        scripts = self._scripts(request)
        return [
            Choice(
                self._model,
                request,
                (base + index * _CHOICE_STEP) % 2**64,
                scripts[index % len(scripts)] if scripts is not None else None,
                self._num_words,
            )
            for index in range(request.sampling.num_choices)
        ]

    def prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        """Log probabilities of each prompt token except the first, which has none."""
        num_top = request.sampling.prompt_logprobs
        if num_top is None or request.prior_tokens_of(0):
            return None
        logprobs: list[TokenLogprobs | None] = [None]
        for position, token in enumerate(request.token_ids[1:], 1):
            digest = xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), token)
            logprobs.append(_synthetic_logprobs(token, num_top, self._model.words, digest))
        return tuple(logprobs)

    def _check(self, request: Request) -> None:
        sampling = request.sampling
        for param, number in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if number is not None and not 0 <= number <= MAX_LOGPROBS:
                raise InvalidRequest(f"{param} is {number}; it must be from 0 to {MAX_LOGPROBS}", param=param)
        allowed, size = sampling.allowed_token_ids, self._model.vocabulary_size
        if allowed is not None and not (allowed and min(allowed) >= 0 and max(allowed) < size):
            raise InvalidRequest(
                f"allowed_token_ids must be one or more ids under {size}, the size of the vocabulary",
                param="allowed_token_ids",
            )

    def _scripts(self, request: Request) -> tuple[_Script, ...] | None:
        if request.sampling.allowed_token_ids is not None:
            return None
        if self._from_prompt:
            assert self._tokenizer is not None
            texts = scripted_texts(self._tokenizer.decode(request.token_ids, skip_special_tokens=False))
            if texts is not None:
                return tuple(self._encode(text) for text in texts)
        return self._default

    def _encode(self, text: str) -> _Script:
        assert self._tokenizer is not None
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def scripted_texts(prompt: str) -> tuple[str, ...] | None:
    """The alternatives in the last `<say>one<or/>another</say>` of a prompt; None if it has none."""
    start = prompt.rfind(OPEN, 0, max(prompt.rfind(CLOSE), 0))
    if start < 0:
        return None
    start += len(OPEN)
    return tuple(prompt[start : prompt.index(CLOSE, start)].split(OR))


def _tokenizer(model: SimModel) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(model.card.tokenizer_json)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _synthetic_logprobs(token: int, num_top: int, words: Sequence[int], digest: int) -> TokenLogprobs:
    """Plausible log probabilities: the token has half or more, each alternative half of the rest."""
    share = 0.5 + (digest & 0xFFFF) / 2**17
    chosen = math.log(share)
    top = [(token, chosen)]
    left = 1.0 - share
    start = digest >> 16
    for offset in range(len(words)):
        if len(top) >= num_top:
            break
        word = words[(start + offset) % len(words)]
        if word != token:
            left /= 2
            top.append((word, math.log(left)))
    return TokenLogprobs(token, chosen, tuple(top[:num_top]))
