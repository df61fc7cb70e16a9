"""What a simulated answer says: a scripted text, or words without end.

A token is a function of the request, its seed and all tokens before it (`sim_answer`), so that a resumed answer
goes on unchanged if it is resumed with the right tokens; KV that is wrong makes another one of it. Knows no
scheduling: the engine asks for one token after the other, and ends the answer.

A script is a text that is said exactly, cut into tokens by the model's own tokenizer, then EOS. The names
of special tokens in it are spelled out and not said as tokens: they would be taken out of the text again,
and EOS would end it. Where EOS may not be said (`ignore_eos`, fewer than `min_tokens` so far) words follow.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
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
"""Alternatives per token that may be asked for, as of most engines: an answer's size stays bounded."""

_NEVER = sys.maxsize
_CHOICE_STEP = 0x9E3779B97F4A7C15
_LOGPROBS_SALT = 0xA5A5A5A5A5A5A5A5

_Script = tuple[int, ...]


class Choice:
    """One answer to a request. Nothing of it changes: where it has got to is known by who asks."""

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
        may_end = not stop.ignore_eos or self._eos in stop.stop_token_ids
        says_eos = length is not None and may_end
        self._eos_at = max(length or 0, stop.min_tokens) if says_eos else _NEVER

    def token(self, position: int, state: int, confusion: int = 0) -> int:
        """The token at `position`, after the history of that state. Wrong KV (a `confusion`) makes it another word."""
        if confusion:
            return self._words[(state ^ confusion) % len(self._words)]
        if position < len(self._script):
            return self._script[position]
        if position >= self._eos_at:
            return self._eos
        return self._words[state % len(self._words)]

    def logprobs(self, position: int, token: int) -> TokenLogprobs | None:
        if self._num_logprobs is None:
            return None
        digest = xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), self.seed ^ _LOGPROBS_SALT)
        return _made_up(token, self._num_logprobs, self._alternatives, digest)


class Speaker:
    """Finds what is to be said in answer to a request. One per engine."""

    def __init__(
        self,
        model: SimModel,
        say: str | None,
        from_prompt: bool,
        num_words: int | None = None,
        reads_prompts: bool = True,
    ) -> None:
        """`reads_prompts`: what are no tokens is refused; not for prompts of which nobody knows the tokens."""
        self._reads_prompts = reads_prompts
        self._model = model
        self._num_words = num_words
        self._tokenizer = _tokenizer(model) if say is not None or from_prompt else None
        self._from_prompt = from_prompt
        self._said = None if say is None else (self._encode(say),)

    def choices(self, request: Request) -> list[Choice]:
        """InvalidRequest for what no answer could keep to."""
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
        """One for each token of the prompt; nothing comes before the first, so it has none."""
        num_top = request.sampling.prompt_logprobs
        if num_top is None or request.resumed(0):
            return None
        found: list[TokenLogprobs | None] = [None]
        for position, token in enumerate(request.token_ids[1:], 1):
            digest = xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), token)
            found.append(_made_up(token, num_top, self._model.words, digest))
        return tuple(found)

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
        return self._said

    def _encode(self, text: str) -> _Script:
        assert self._tokenizer is not None
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def scripted_texts(prompt: str) -> tuple[str, ...] | None:
    """The alternatives in the last `<say>one<or/>another</say>` of a prompt; None when there is none."""
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


def _made_up(token: int, num_top: int, words: Sequence[int], digest: int) -> TokenLogprobs:
    """Log probabilities that could be real: the token has half or more, each other half of what is left."""
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
