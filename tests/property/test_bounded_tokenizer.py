"""A text tokenized in slices has the ids of the whole text, for every family of tokenizers whose texts are sliced."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.test_word_encoder import KINDS, O200K, TEXTS, WORDS, byte_level, split, trained
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvolt.core.errors import InvalidRequest
from kvolt.engines.sim.model import tokenizer_json
from kvolt.frontend.tokenization import bounded_tokenizer
from kvolt.frontend.tokenization.bounded_tokenizer import BoundedTokenizer, TooManyTokens

DEEPSEEK = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n"
    r"""\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["""
    "\r\n"
    r"]*|\s*["
    "\r\n"
    r"]+|\s+(?!\S)|\s+",
]
TEKKEN = re.sub(r"\(\?i:[^)]*\)\?", "", O200K)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
MORE = {
    "deepseek": pre_tokenizers.Sequence(
        [*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK), byte_level(False)]
    ),
    "tekken": split(TEKKEN),
    "qwen3.5": split(QWEN35),
}
SMALL_SLICES = patch.object(bounded_tokenizer, "_SLICE_CHARACTERS", 7)
MANY = 10**9


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind in KINDS:
        return trained(kind, "NFC" if kind == "qwen" else None)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = MORE[kind]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Words of several texts together, so that merges across every kind of boundary are learnt where words allow them.
    tokenizer.train_from_iterator([" ".join(WORDS), "\n".join(WORDS), "a  b c\n d 1 2  x"] * 20, trainer)
    return tokenizer


def bounded_of(tokenizer: Any) -> BoundedTokenizer:
    return BoundedTokenizer(tokenizer, json.loads(tokenizer.to_str()))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


LONG_TEXTS = st.lists(
    TEXTS | st.sampled_from(["a ", "b  ", "x \n", "s'", " y\u0301", "c 1", "d\xa0"]), max_size=12
)


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
@settings(max_examples=100, deadline=None)
@given(texts=LONG_TEXTS)
def test_slices_have_the_ids_of_the_whole(kind: str, texts: list[str]) -> None:
    text = "".join(texts)
    bounded = bounded_of(tokenizer_of(kind))
    assert bounded.takes_slices
    with SMALL_SLICES:
        assert bounded.tokenize([text, text[::-1]], MANY) == [
            ids_of(tokenizer_of(kind), text),
            ids_of(tokenizer_of(kind), text[::-1]),
        ]


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
@settings(max_examples=50, deadline=None)
@given(texts=LONG_TEXTS, max_tokens=st.integers(0, 40))
def test_a_text_is_refused_exactly_when_it_has_too_many_tokens(
    kind: str, texts: list[str], max_tokens: int
) -> None:
    text = "".join(texts)
    ids = ids_of(tokenizer_of(kind), text)
    with SMALL_SLICES:
        if len(ids) > max_tokens:
            with pytest.raises(TooManyTokens):
                bounded_of(tokenizer_of(kind)).tokenize([text], max_tokens)
        else:
            assert bounded_of(tokenizer_of(kind)).tokenize([text], max_tokens) == [ids]


class Calls:
    """A tokenizer that records the longest text it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.longest = self.num_characters = 0

    def to_str(self) -> str:
        return str(self._tokenizer.to_str())

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> object:
        self.longest = max(self.longest, *map(len, texts))
        self.num_characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def calls_of(text: str, max_tokens: int) -> Calls:
    calls = Calls(Tokenizer.from_buffer(tokenizer_json()))
    with pytest.raises(TooManyTokens):
        bounded_of(calls).tokenize([text], max_tokens)
    return calls


def test_a_long_text_is_tokenized_in_slices() -> None:
    calls = Calls(Tokenizer.from_buffer(tokenizer_json()))
    [ids] = bounded_of(calls).tokenize(["the water " * 50_000], MANY)
    assert len(ids) >= 100_000
    assert calls.longest < 65_600


def test_short_texts_are_tokenized_in_groups_until_they_are_too_many() -> None:
    calls = Calls(Tokenizer.from_buffer(tokenizer_json()))
    with pytest.raises(TooManyTokens):
        bounded_of(calls).tokenize(["the water " * 1000] * 500, 50_000)
    assert 250_000 <= calls.num_characters < 400_000


def test_half_of_a_surrogate_pair_is_refused() -> None:
    for text in ("\ud800", "\ud800" * 200_000):
        with pytest.raises(InvalidRequest, match="surrogate"):
            bounded_of(Tokenizer.from_buffer(tokenizer_json())).tokenize([text], 100)


def test_words_that_are_too_many_are_not_tokenized_at_all() -> None:
    assert calls_of("word " * 200_000, 100_000).num_characters == 0


def test_a_text_without_boundaries_is_counted_until_it_is_too_long() -> None:
    text = '\n"' * 500_000
    calls = calls_of(text, 50_000)
    assert calls.longest <= 32 * 1024
    assert calls.num_characters < len(text) / 4


def test_tokenizers_whose_texts_are_not_sliced() -> None:
    base = trained("gpt2")
    for change in (
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": split(r"\w+ ?|\W+")},
        {"pre_tokenizer": split(r" ?\p{L}+|(?<=a)\s+|\s+")},
        {"pre_tokenizer": split(r"\p{N}{1,3}")},
        {"normalizer": normalizers.Replace(" ", "")},
        {"model": models.WordLevel({"a": 0}, unk_token="a")},
    ):
        tokenizer = Tokenizer.from_str(base.to_str())
        for name, value in change.items():
            setattr(tokenizer, name, value)
        assert not bounded_of(tokenizer).takes_slices, change


@pytest.mark.parametrize(
    "token", [AddedToken("end of"), AddedToken("end\xa0of"), AddedToken("<e>", lstrip=True)], ids=str
)
def test_an_added_token_that_may_lie_across_a_boundary(token: AddedToken) -> None:
    tokenizer = Tokenizer.from_str(trained("gpt2").to_str())
    assert bounded_of(tokenizer).takes_slices
    tokenizer.add_tokens([token])
    assert not bounded_of(tokenizer).takes_slices
