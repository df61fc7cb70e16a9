"""Words looked up give the ids that the tokenizer gives, for every kind of byte-level BPE we take."""

from __future__ import annotations

import json
import unicodedata
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvolt.engines.sim.model import tokenizer_json
from kvolt.frontend.tokenization.word_encoder import MAX_CHARACTERS, WordEncoder

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

WORDS = [
    "the",
    "then",
    "they'll",
    "Hello",
    "HELLO",
    "x1",
    "1234567",
    "foo_bar",
    "don't",
    "I'm",
    "  ",
    "\n\n",
    "a-b",
]


def byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    isolated = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([isolated, byte_level(False)])


KINDS = {
    "gpt2": lambda: byte_level(True),
    "llama3": lambda: split(LLAMA3),
    "qwen": lambda: split(QWEN),
    "o200k": lambda: split(O200K),
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level(True)]),
    "digits together": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(False), byte_level(True)]),
}


@cache
def trained(kind: str, normalizer: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = KINDS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = getattr(normalizers, normalizer)()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "\n".join(WORDS)] * 20, trainer)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def word_encoder(tokenizer: Tokenizer) -> WordEncoder | None:
    return WordEncoder.from_tokenizer(tokenizer, json.loads(tokenizer.to_str()))


@cache
def words_of(kind: str, normalizer: str | None = None) -> WordEncoder:
    encoder = word_encoder(trained(kind, normalizer))
    assert encoder is not None, "this kind is taken"
    return encoder


TEXTS = st.lists(
    st.sampled_from(
        [
            *WORDS,
            " ",
            "'",
            "'S",
            "\t",
            "\r\n",
            "\x00",
            "\x1c",
            "\x7f",
            "/",
            "99",
            "<|im_end|>",
            "<tool>",
            "é",
            "e\u0301",
            "Straße",
            "мир",
            "日本語",
            "²",
            "Ⅷ",
            "١٢",
            "\xa0",
            "\u2028",
            "\x85",
            "\u017f",
            "'\u017f",
            "𝄞",
            "\u0378",
        ]
    )
    | st.text(max_size=5)
    | st.text(st.characters(codec="ascii"), max_size=8),
    max_size=12,
).map("".join)


def is_beyond_doubt(text: str) -> bool:
    return all(
        ord(character) < 0x10000
        and unicodedata.category(character) not in ("Cn", "Co", "Cs")
        and character not in "\u017f\u212a"
        for character in text
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_the_same_ids_or_none(kind: str, text: str) -> None:
    tokenizer, encoder = trained(kind), words_of(kind)
    ids = encoder.encode(text)
    if ids is None:
        assert not is_beyond_doubt(text) or any(
            token in text for token in ("<|im_end|>", "<|im_start|>", "<tool>")
        )
    else:
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        assert encoder.encode(text) == ids, "also from the table"


@pytest.mark.parametrize("normalizer", ["NFC", "NFKC"])
@settings(max_examples=50, deadline=None)
@given(text=TEXTS)
def test_normal_forms(normalizer: str, text: str) -> None:
    ids = words_of("qwen", normalizer).encode(text)
    assert ids is None or ids == trained("qwen", normalizer).encode(text, add_special_tokens=False).ids


def test_the_simulated_model_is_taken() -> None:
    tokenizer = Tokenizer.from_buffer(tokenizer_json())
    encoder = word_encoder(tokenizer)
    assert encoder is not None
    text = "Tell me about the water and\n\nthe  house, 123 times!"
    assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_what_is_not_taken() -> None:
    base = trained("gpt2")
    for change in (
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": split(r"\p{Han}+|[^\p{Han}]+")},
        {"pre_tokenizer": split(r"(\w+)|\W+")},
        {"pre_tokenizer": pre_tokenizers.Split(Regex(LLAMA3), "isolated")},
        {"normalizer": normalizers.Lowercase()},
        {"model": models.BPE(base.model and {}, [], byte_fallback=True)},
        {"model": models.WordLevel({"a": 0}, unk_token="a")},
    ):
        tokenizer = Tokenizer.from_str(base.to_str())
        for name, value in change.items():
            setattr(tokenizer, name, value)
        assert word_encoder(tokenizer) is None, change


def test_long_and_rare_words_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.frontend.tokenization.word_encoder._MAX_WORDS", 10)
    encoder = word_encoder(trained("gpt2"))
    assert encoder is not None
    for number in range(100):
        text = f"word{number} " + "x" * 100
        assert encoder.encode(text) == trained("gpt2").encode(text, add_special_tokens=False).ids
    assert len(encoder._words) <= 10
    assert len(encoder._words.old) <= 10
    assert all(len(word) <= 64 for word in [*encoder._words, *encoder._words.old])
    assert encoder.encode("a" * (MAX_CHARACTERS + 1)) is None
