"""Tokens to text: what is held back, what is plain, what an odd vocabulary or id does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvolt.engines.sim.model import SPECIAL, tokenizer_json, word_token_ids
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.detokenizer.tokens import Tokens
from kvolt.frontend.detokenizer.window import WindowDetokenizer

SIM = Vocabulary(tokenizer_json())
END = SIM.token_id("<|im_end|>")

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "▁the", "▁", "water", '▁"', "</s>", *BYTES]


def piece_tokenizer(decoder: object, pieces: list[str] = PIECES) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.to_str().encode())


LLAMA_STEPS = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
LLAMA = of(piece_tokenizer(decoders.Sequence(LLAMA_STEPS)))


def in_bytes(text: str) -> list[int]:
    return [PIECES.index(BYTES[byte]) for byte in text.encode()]


def with_decoder(decoder: dict[str, Any] | None) -> Vocabulary:
    document = json.loads(piece_tokenizer(None).to_str())
    document["decoder"] = decoder
    return Vocabulary(json.dumps(document).encode())


# Byte-level


def test_half_of_a_character_is_held_back_and_then_comes_whole() -> None:
    detokenizer = SIM.detokenizer()
    ids = SIM.tokenizer.encode("a🎉b").ids
    fed = []
    for token_id in ids:
        fed.append((detokenizer.feed(token_id), detokenizer.clean))
    assert fed == [("a", True), ("", False), ("", False), ("", False), ("🎉", True), ("b", True)]
    assert detokenizer.finish() == ""


def test_a_character_that_never_ends_is_replaced() -> None:
    detokenizer = SIM.detokenizer()
    first, second, *_ = SIM.tokenizer.encode("🎉").ids
    word = word_token_ids()[0]
    assert [detokenizer.feed(token_id) for token_id in (first, second, word, first)] == [
        "",
        "",
        "\ufffd the",
        "",
    ]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.clean
    assert detokenizer.finish() == ""


def test_a_special_token_inside_a_character_is_as_if_not_there() -> None:
    first, *rest = SIM.tokenizer.encode("🎉").ids
    detokenizer = SIM.detokenizer()
    assert "".join(map(detokenizer.feed, [first, END, 10**6, *rest])) == "🎉"
    shown = SIM.detokenizer(skip_special_tokens=False)
    assert "".join(map(shown.feed, [first, END])) == "\ufffd<|im_end|>"


def test_plain_tokens_are_ready_for_a_json_string() -> None:
    word = word_token_ids()[0]
    quote, newline = SIM.tokenizer.encode('"\n').ids
    half = SIM.tokenizer.encode("🎉").ids[0]
    ids = (word, quote, newline, half, END, 10**6, -1, 2**40)
    assert [SIM.plain_json[token_id] for token_id in ids] == [
        b" the",
        b'\\"',
        b"\\n",
        None,
        b"",
        b"",
        b"",
        b"",
    ]


def test_with_special_tokens_shown_no_token_goes_past_the_detokenizer() -> None:
    detokenizer = SIM.detokenizer(skip_special_tokens=False)
    texts = []
    for token_id in (word_token_ids()[0], END, *SIM.tokenizer.encode("🎉").ids):
        assert not detokenizer.clean
        texts.append(detokenizer.feed(token_id))
    assert "".join(texts) == " the<|im_end|>🎉"
    assert not detokenizer.clean


def test_an_added_token_is_bytes_only_if_it_is_spelled_with_byte_symbols() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json().decode())
    tokenizer.add_tokens([AddedToken("日本"), AddedToken("é"), AddedToken("a b")])
    words = of(tokenizer)
    own, single, spaced = (words.token_id(text) for text in ("日本", "é", "a b"))
    assert words.plain_json[own] == "日本".encode()
    assert words.plain_json[spaced] == b"a b"
    assert words.plain_json[single] is None
    assert words.token_bytes(single) == b"\xe9"
    assert words.decode([own, single, spaced]) == "日本\ufffda b"


# Sentencepiece


def test_the_space_before_the_first_word_is_dropped_once() -> None:
    the, space = PIECES.index("▁the"), PIECES.index("▁")
    detokenizer = LLAMA.detokenizer()
    assert not detokenizer.clean
    assert [detokenizer.feed(the), detokenizer.clean, detokenizer.feed(the)] == ["the", True, " the"]
    assert LLAMA.plain_json[the] == b" the"
    lonely = LLAMA.detokenizer()
    assert [lonely.feed(PIECES.index("</s>")), lonely.feed(space), lonely.feed(the)] == ["", "", " the"]


def test_a_byte_run_comes_when_it_ends() -> None:
    detokenizer = LLAMA.detokenizer()
    water = PIECES.index("water")
    fed = [detokenizer.feed(token_id) for token_id in [water, *in_bytes("é水"), 10**6, water]]
    assert fed == ["water", *[""] * 6, "é水water"]
    assert [detokenizer.feed(token_id) for token_id in in_bytes("é")] == ["", ""]
    assert not detokenizer.clean
    assert detokenizer.finish() == "é"


def test_a_broken_byte_run_is_replaced_byte_by_byte_even_where_it_was_good() -> None:
    detokenizer = LLAMA.detokenizer()
    good, bad = in_bytes("é"), PIECES.index("<0xFF>")
    fed = [detokenizer.feed(token_id) for token_id in [*good, bad, bad, PIECES.index("water")]]
    assert fed == ["", "", "\ufffd" * 3, "\ufffd", "water"]
    assert [detokenizer.feed(token_id) for token_id in [*good, good[0]]] == ["", "", ""]
    assert detokenizer.finish() == "\ufffd" * 3


def test_an_older_spelling_of_metaspace_is_understood() -> None:
    older = {"type": "Metaspace", "replacement": "▁", "str_rep": "▁", "add_prefix_space": True}
    words = with_decoder(older)
    the = PIECES.index("▁the")
    detokenizer = words.detokenizer()
    assert [detokenizer.feed(the), detokenizer.feed(the)] == ["the", " the"]
    assert words.plain_json[the] == b" the"


def test_a_sequence_in_a_sequence_is_one_sequence() -> None:
    inner = decoders.Sequence(LLAMA_STEPS[:2])
    words = of(piece_tokenizer(decoders.Sequence([inner, decoders.Sequence(LLAMA_STEPS[2:])])))
    assert words.plain_json[PIECES.index("▁the")] == b" the"
    alone = of(piece_tokenizer(decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])])))
    assert alone.plain_json[PIECES.index("water")] == b"water"


# Any other decoder


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([*LLAMA_STEPS[:3], decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
    ],
    ids=["none", "wordpiece", "strips the end", "strips each", "fuses first"],
)
def test_no_token_is_plain_when_the_decoder_is_unknown(decoder: object) -> None:
    words = of(piece_tokenizer(decoder))
    detokenizer = words.detokenizer()
    ids = [PIECES.index(piece) for piece in ("water", "▁the", "▁", "▁the", "</s>", "▁")]
    fed = []
    for token_id in ids:
        fed.append(detokenizer.feed(token_id))
        assert not detokenizer.clean
        assert words.plain_json[token_id] is None
    assert fed[0] == "water"
    assert "".join(fed) + detokenizer.finish() == words.decode(ids)
    assert words.detokenizer().finish() == ""


def test_what_an_unknown_decoder_takes_back_stays_given_out() -> None:
    """The stated limit of decoding by a window: here the run is read before the spaces."""
    words = of(piece_tokenizer(decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")])))
    detokenizer = words.detokenizer()
    ids = [*in_bytes("é"), PIECES.index("<0xFF>")]
    assert [detokenizer.feed(token_id) for token_id in ids] == ["", "é", ""]
    assert words.decode(ids) == "\ufffd" * 3
    detokenizer.finish()
    assert detokenizer.finish() == ""


class CountingTokenizer:
    """Counts what is decoded; says nothing but half characters."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(token_ids)
        return "\ufffd" * len(token_ids)


def test_an_endless_row_of_half_characters_costs_no_square() -> None:
    counting = CountingTokenizer()
    detokenizer = WindowDetokenizer(counting, Tokens(SIM.tokenizer), True)  # type: ignore[arg-type]
    half = SIM.tokenizer.encode("🎉").ids[0]
    assert {detokenizer.feed(half) for _ in range(4000)} == {""}
    assert counting.num_decoded < 3 * 4000
    assert detokenizer.finish() == "\ufffd" * 4000


# The vocabulary


def test_a_tokens_own_text_and_bytes() -> None:
    half = SIM.tokenizer.encode("🎉").ids[0]
    assert (SIM.token_text(half), SIM.token_bytes(half)) == ("\ufffd", b"\xf0")
    assert (SIM.token_text(END), SIM.token_bytes(END)) == ("<|im_end|>", b"<|im_end|>")
    assert SIM.token_text(word_token_ids()[0]) == " the"
    space, byte = PIECES.index("▁the"), PIECES.index("<0xC3>")
    assert (LLAMA.token_text(space), LLAMA.token_bytes(space)) == (" the", b" the")
    assert (LLAMA.token_text(byte), LLAMA.token_bytes(byte)) == ("\ufffd", b"\xc3")
    window = of(piece_tokenizer(decoders.WordPiece()))
    assert (window.token_text(3), window.token_bytes(3)) == ("water", b"water")
    for words in (SIM, LLAMA, window):
        assert [words.token_text(token_id) for token_id in (10**6, -1, 2**40)] == [""] * 3
        assert words.token_bytes(10**6) == b""


def test_ids_that_name_no_token_say_nothing() -> None:
    word = word_token_ids()[0]
    for words in (SIM, LLAMA, with_decoder(None)):
        detokenizer = words.detokenizer()
        assert [detokenizer.feed(token_id) for token_id in (10**6, -1, 2**40)] == [""] * 3
        assert detokenizer.finish() == ""
    assert SIM.decode([-1, word, 2**40, 10**6]) == " the"


def test_special_tokens_are_known_by_id_and_by_name() -> None:
    assert SIM.special_ids == {SIM.token_id(token) for token in SPECIAL}
    assert SIM.token_id("no such token") is None
    assert SIM.decode([END, word_token_ids()[0]]) == " the"
    assert SIM.decode([END], skip_special_tokens=False) == "<|im_end|>"


def test_tables_are_empty_at_first_and_keep_tokens_only() -> None:
    words = Vocabulary(tokenizer_json())
    assert len(words.plain_json) == 0
    for token_id in (*word_token_ids()[:7], *range(10**6, 10**6 + 50)):
        words.plain_json[token_id]
    assert len(words.plain_json) == 7


def test_the_size_reaches_to_the_highest_id() -> None:
    document = json.loads(tokenizer_json())
    vocabulary = document["model"]["vocab"]
    assert SIM.size == len(vocabulary)
    token = max(vocabulary, key=vocabulary.get)
    vocabulary[token] = 5000
    words = Vocabulary(json.dumps(document).encode())
    assert words.size == 5001
    assert words.plain_json[4999] == b""


def test_streams_share_tables_and_nothing_else() -> None:
    one, other = SIM.detokenizer(), SIM.detokenizer()
    first, second = SIM.tokenizer.encode("🎉").ids, SIM.tokenizer.encode("日").ids
    got = [one.feed(first[0]), other.feed(second[0]), *map(one.feed, first[1:]), *map(other.feed, second[1:])]
    assert "".join(got) == "🎉日"
