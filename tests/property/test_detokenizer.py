"""Text as tokens come against the library's batch decoding, for every kind of decoder."""

from __future__ import annotations

import json
from codecs import utf_8_decode
from functools import cache
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvolt.engines.sim.model import tokenizer_json
from kvolt.frontend.detokenizer.detokenizer import Detokenizer, Vocabulary

CORPUS = [
    "the water and the country, the mother of the water",
    "日本語の水と国 日本語 水水水 🎉🎉 👩‍👩‍👧 🎉 naïve café Ünïcödé café",
    'a "quoted" \\ back\tslash\nline\x00\x7f \u2028',
] * 3

quick = settings(deadline=None, max_examples=50)

NO_TOKENS = (-1, 2**31, 2**32, 2**40)


EDGES = (0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xC1, 0xC2, 0xE0, 0xE1, 0xED, 0xF0, 0xF1, 0xF4, 0xF5)
"""A byte of each kind that a UTF-8 decoder distinguishes."""


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|end|>", "<終>"])
    # Spelled with byte symbols only; with none; with some; with a space, which is none.
    tokenizer.add_tokens([AddedToken(text) for text in ("<tool>", "日本の", "é", "x日é", " two words ")])
    return tokenizer


SPACED = ["", "▁", "▁▁", "▁the", "▁water", "the", "a", " ", "  b", '"', "\n", "\ufffd", "日本", "▁日", "x▁y"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NOT_BYTES = ["<0x+5>", "<0x-5>", "<0xé>", "<0xGG>", "<0x1>", "<0x▁>", "<0xe4>"]


def pieces(decoder: object, tokens: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["▁added▁", "<tool>", "水"])
    return tokenizer


def unigram(decoder: object) -> Tokenizer:
    scored = [(token, -float(index)) for index, token in enumerate(["<unk>", *SPACED[1:], *BYTES])]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def chain(*steps: object) -> object:
    return decoders.Sequence(list(steps))


SPACES = decoders.Replace("▁", " ")
RUNS, FUSE = decoders.ByteFallback(), decoders.Fuse()
ALL = [*SPACED, *BYTES, *NOT_BYTES]

KNOWN = {
    "sim": lambda: Tokenizer.from_buffer(tokenizer_json()),
    "byte-level": byte_level,
    "llama": lambda: pieces(chain(SPACES, RUNS, FUSE, decoders.Strip(" ", 1, 0)), ALL),
    "gemma": lambda: pieces(chain(SPACES, RUNS, FUSE), ALL),
    "strip more": lambda: pieces(chain(SPACES, RUNS, FUSE, decoders.Strip("\ufffd", 3, 0)), ALL),
    "two replacements": lambda: pieces(chain(SPACES, decoders.Replace("  ", "<0x41>"), RUNS), ALL),
    "no bytes": lambda: pieces(chain(SPACES, FUSE, decoders.Strip(" ", 2, 0)), ALL),
    "metaspace": lambda: unigram(decoders.Metaspace()),
    "metaspace first": lambda: unigram(decoders.Metaspace(prepend_scheme="first")),
    "metaspace never": lambda: unigram(decoders.Metaspace(prepend_scheme="never")),
    "metaspace bytes": lambda: pieces(
        chain(decoders.Metaspace(), RUNS, FUSE, decoders.Strip(" ", 1, 0)), ALL
    ),
    "unigram llama": lambda: unigram(chain(SPACES, RUNS, FUSE, decoders.Strip(" ", 1, 0))),
    "nothing to do": lambda: pieces(chain(), ALL),
}

WORDS = ["a", "##b", "##", "c</w>", "</w>", "|", "<pad>", "x", "don", " 't", ".", "日", "\ufffd", "", " "]

FOREIGN = {
    "none": lambda: pieces(None, WORDS),
    "wordpiece": lambda: pieces(decoders.WordPiece(), WORDS),
    "bpe suffix": lambda: pieces(decoders.BPEDecoder(), WORDS),
    "ctc": lambda: pieces(decoders.CTC(), WORDS),
    "strip each": lambda: pieces(chain(SPACES, decoders.Strip(" ", 1, 0)), SPACED),
    "regex": lambda: pieces(chain(decoders.Replace(Regex("[▁t]+"), " "), FUSE), SPACED),
    "bytes, then strip": lambda: with_decoder(
        byte_level(), chain(decoders.ByteLevel(), decoders.Strip("x", 1, 0))
    ),
}


def with_decoder(tokenizer: Tokenizer, decoder: object) -> Tokenizer:
    tokenizer.decoder = decoder
    return tokenizer


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary((KNOWN | FOREIGN)[name]().to_str().encode())


@cache
def sequences(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, with whole texts, whole characters in bytes and ids that name nothing among them."""
    words = vocabulary(name)
    ids = {words.tokenizer.id_to_token(token_id): token_id for token_id in range(words.size)}
    texts = ["the water", "日本", "🎉é", '"\n', "<|end|>"]
    parts = [(token_id,) for token_id in (*range(words.size + 2), *NO_TOKENS)]
    likely = [tuple(words.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    likely += [
        (ids[token],) for token in (*SPACED, *NOT_BYTES, "<s>", "</s>", "<|end|>", "<tool>") if token in ids
    ]
    if BYTES[0] in ids:
        likely += [tuple(ids[BYTES[byte]] for byte in text.encode()) for text in texts]
        likely += [(ids[BYTES[byte]],) for byte in EDGES]
    drawn = st.lists(st.sampled_from(parts) | st.sampled_from(likely), max_size=12)
    return drawn.map(lambda parts: [token_id for part in parts for token_id in part])


def stream(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([*map(detokenizer.feed, ids), detokenizer.finish()])


def stream_past(words: Vocabulary, ids: list[int]) -> str:
    """As a frontend does it: plain tokens go past the detokenizer."""
    detokenizer = words.detokenizer()
    parts = []
    for token_id in ids:
        plain = words.plain_json[token_id] if detokenizer.clean else None
        parts.append(detokenizer.feed(token_id) if plain is None else json.loads(b'"%b"' % plain))
    return "".join([*parts, detokenizer.finish()])


@pytest.mark.parametrize("name", [*KNOWN, *FOREIGN])
@quick
@given(data=st.data())
def test_streamed_text_is_batch_text(name: str, data: st.DataObject) -> None:
    words = vocabulary(name)
    ids = data.draw(sequences(name))
    in_range = [token_id for token_id in ids if 0 <= token_id < 2**32]
    for skip in (True, False):
        whole = words.tokenizer.decode(in_range, skip_special_tokens=skip)
        assert words.decode(ids, skip) == whole
        assert stream(words.detokenizer(skip), ids) == whole
    assert stream_past(words, ids) == words.decode(ids)


@pytest.mark.parametrize("name", ["sim", "byte-level"])
@quick
@given(data=st.data())
def test_byte_level_text_waits_for_one_character_at_most(name: str, data: st.DataObject) -> None:
    words = vocabulary(name)
    ids = data.draw(sequences(name))
    detokenizer = words.detokenizer()
    given_out = ""
    for count, token_id in enumerate(ids, 1):
        given_out += detokenizer.feed(token_id)
        so_far = words.decode(ids[:count])
        # Two of them: Python waits for the third byte of a surrogate, though none is allowed.
        assert so_far in (given_out, given_out + "\ufffd", given_out + "\ufffd\ufffd")
        if detokenizer.clean:
            assert so_far == given_out


@pytest.mark.parametrize("name", ["llama", "gemma", "metaspace", "metaspace bytes"])
@quick
@given(data=st.data())
def test_sentencepiece_text_waits_for_the_end_of_a_byte_run_only(name: str, data: st.DataObject) -> None:
    words = vocabulary(name)
    ids = data.draw(sequences(name))
    detokenizer = words.detokenizer()
    given_out = ""
    in_run = False
    for count, token_id in enumerate(ids, 1):
        given_out += detokenizer.feed(token_id)
        token = None if token_id in NO_TOKENS else words.tokenizer.id_to_token(token_id)
        if token is not None and token_id not in words.special_ids:
            in_run = name != "metaspace" and (token in BYTES or token in ("<0x+5>", "<0xe4>"))
        if not in_run:
            assert given_out == words.decode(ids[:count])
        assert not (detokenizer.clean and in_run)


@cache
def byte_ids(words: Vocabulary) -> list[int]:
    found = {words.token_bytes(token_id): token_id for token_id in range(words.size)}
    return [found[bytes((byte,))] for byte in range(256)]


def test_rust_and_python_agree_on_every_kind_of_broken_utf8() -> None:
    words = vocabulary("sim")
    ids = byte_ids(words)
    for data in product(EDGES, repeat=4):
        lossy = words.tokenizer.decode([ids[byte] for byte in data])
        assert lossy == bytes(data).decode(errors="replace")


@quick
@given(st.lists(st.sampled_from(EDGES) | st.integers(0, 255), max_size=24))
@example([0xED, 0xA0, 0x80, 0x41])
@example([0xF0, 0x9F, 0x8E, 0xF0, 0x9F, 0x8E, 0x89])
def test_bytes_one_by_one_are_bytes_at_once(data: list[int]) -> None:
    words = vocabulary("sim")
    ids = byte_ids(words)
    assert stream(words.detokenizer(), [ids[byte] for byte in data]) == bytes(data).decode(errors="replace")
    held, text = b"", ""
    for byte in data:
        held += bytes((byte,))
        more, num_used = utf_8_decode(held, "replace", False)
        held, text = held[num_used:], text + more
        assert len(held) <= 3
    assert text + held.decode(errors="replace") == bytes(data).decode(errors="replace")


@pytest.mark.parametrize("name", [*KNOWN])
def test_a_plain_token_says_the_same_after_any_other(name: str) -> None:
    words = vocabulary(name)
    before = words.tokenizer.encode("the", add_special_tokens=False).ids or [words.size - 1]
    start = words.decode(before)
    for token_id in range(words.size):
        plain = words.plain_json[token_id]
        if plain is not None:
            assert start + json.loads(b'"%b"' % plain) == words.decode([*before, token_id])
