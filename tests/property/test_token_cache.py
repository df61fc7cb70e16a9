"""The cached encoder says what the tokenizer says, for any text, any history and any size of cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from kvolt.engines.sim.model import tokenizer_json
from kvolt.frontend.tokenization.token_cache import CachedEncoder

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_end|>\n", "[INST]", "<|im_start|><|im_end|>")
ORDINARY = ("<think>", "\n\n")
"""Added tokens that are not special; the text is not cut there."""


def with_added(tokenizer: Tokenizer, *flagged: AddedToken) -> Tokenizer:
    given_flags = {token.content for token in flagged}
    plain = [AddedToken(text, normalized=False) for text in SPECIAL if text not in given_flags]
    tokenizer.add_special_tokens([*plain, *(token for token in flagged if token.special)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ORDINARY])
    tokenizer.add_tokens([AddedToken("Water", normalized=True)])
    tokenizer.add_tokens([token for token in flagged if not token.special])
    return tokenizer


def byte_level() -> Tokenizer:
    return with_added(Tokenizer.from_buffer(tokenizer_json()))


def byte_level_spaced() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_level_normalized() -> Tokenizer:
    """As Qwen and Llama 3 have it."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


LETTERS = sorted({*"▁ abcdefghijklmnopqrstuvwxyzWé<>|_/[]\n"})
PIECES = ["▁the", "▁water", "the", "wat", "er", "▁▁", "im_", "▁<", "start", "end", "a▁b"]


def sentencepiece_bpe(*steps: normalizers.Normalizer) -> Tokenizer:
    """As Llama 2 has it: a dummy prefix before each piece, bytes for what is unknown."""
    vocabulary = {text: index for index, text in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256))])}
    merges: list[tuple[str, str]] = []
    for letter in LETTERS:
        vocabulary.setdefault(letter, len(vocabulary))
    for piece in PIECES:
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocabulary:
                vocabulary[piece[:end]] = len(vocabulary)
                merges.append((piece[: end - 1], piece[end - 1]))
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    return with_added(tokenizer)


def unigram(scheme: str) -> Tokenizer:
    pieces = [("<unk>", 0.0), *((text, -5.0) for text in LETTERS), *((text, -2.0) for text in PIECES)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return with_added(tokenizer)


def word_piece() -> Tokenizer:
    words = ["[UNK]", "the", "wat", "##er", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    tokenizer = Tokenizer(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return with_added(tokenizer)


def flagged(**flags: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(tokenizer_json())
    return with_added(tokenizer, AddedToken("<s>", normalized=False, special=True, **flags))


def flagged_beside(special: str, **flags: bool) -> Tokenizer:
    tokenizer = flagged(**flags)
    tokenizer.add_special_tokens([AddedToken(special, normalized=False)])
    return tokenizer


def truncating() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(7)
    return tokenizer


def padding() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_padding(length=11)
    return tokenizer


def overlapping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("the <|im", normalized=False)])
    return tokenizer


def doubling() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    return tokenizer


def no_special() -> Tokenizer:
    tokenizer = sentencepiece_bpe()
    plain = Tokenizer(tokenizer.model)
    plain.normalizer = tokenizer.normalizer
    return plain


CUT: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, prefix space": byte_level_spaced,
    "byte level, normalized and split": byte_level_normalized,
    "sentencepiece": sentencepiece_bpe,
    "sentencepiece, dummy prefix": lambda: sentencepiece_bpe(normalizers.Prepend("▁")),
    "sentencepiece, stripped": lambda: sentencepiece_bpe(normalizers.Strip(), normalizers.Lowercase()),
    "metaspace first": lambda: unigram("first"),
    "metaspace always": lambda: unigram("always"),
    "metaspace never": lambda: unigram("never"),
    "word piece": word_piece,
    "lstrip": lambda: flagged(lstrip=True),
    "rstrip": lambda: flagged(rstrip=True),
    "single word": lambda: flagged(single_word=True),
}
NOT_CUT: dict[str, Callable[[], Tokenizer]] = {
    "rstrip before space": lambda: flagged_beside(" <x>", rstrip=True),
    "single word before a letter": lambda: flagged_beside("x>", single_word=True),
    "truncating": truncating,
    "padding": padding,
    "overlapping": overlapping,
    "doubling": doubling,
    "no special tokens": no_special,
}

texts = st.lists(
    st.sampled_from(SPECIAL + ORDINARY)
    | st.sampled_from(
        ["the", " the", "water", " Water ", " ", "  ", "\n", "<|im_", "|>", "<", ">", "end|>", "12", "<x>"]
    )
    | st.text(st.characters(codec="utf-8"), max_size=6)
    | st.sampled_from(["e\u0301", "ﬁ", "日本語", "👩‍👩‍👧", "▁", "\u00a0", "\x00"]),
    max_size=14,
).map("".join)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return (CUT | NOT_CUT)[kind]()


@cache
def encoder_of(kind: str, max_bytes: int) -> CachedEncoder:
    return CachedEncoder(tokenizer_of(kind), max_bytes)


@pytest.mark.parametrize("kind", [*CUT, *NOT_CUT])
@settings(deadline=None, max_examples=60)
@given(history=st.lists(texts, min_size=1, max_size=6), max_bytes=st.sampled_from([0, 3000, 8000, 100_000]))
def test_the_ids_are_the_tokenizers_own(kind: str, history: list[str], max_bytes: int) -> None:
    tokenizer, encoder = tokenizer_of(kind), encoder_of(kind, max_bytes)
    assert encoder.exact == (kind in CUT), encoder.note
    encoder.clear()
    for text in [*history, history[0], "".join(history), history[0]]:
        assert encoder.encode(text) == tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        check_integrity(encoder)
        assert encoder.stats.bytes <= max_bytes


def check_integrity(encoder: CachedEncoder) -> None:
    stats = encoder.stats
    again = sum(num_bytes for _, num_bytes in encoder._again.values())
    assert stats.bytes == again + sum(num_bytes for _, num_bytes in encoder._once.values())
    assert stats.entries == len(encoder._once) + len(encoder._again)
    assert again == encoder._again_bytes
    assert not encoder._once.keys() & encoder._again.keys()
