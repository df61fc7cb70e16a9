"""The cached encoder: what is tokenized, what is kept, what is thrown away."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from kvolt.core.errors import InvalidRequest
from kvolt.engines.sim.model import tokenizer_json
from kvolt.frontend.tokenization.token_cache import CachedEncoder, longest_of

ROOM = 1 << 20


class Watched:
    """A tokenizer that remembers what it was asked to tokenize."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_buffer(tokenizer_json())
        self.seen: list[str] = []
        self.before: Callable[[list[str]], object] = lambda texts: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
        self.before(texts)
        self.seen += texts
        return self._tokenizer.encode_batch_fast(texts, **options)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture
def tokenizer() -> Watched:
    return Watched()


def watched_encoder(tokenizer: Watched, max_bytes: int) -> CachedEncoder:
    """All that is not remembered goes to the tokenizer."""
    return CachedEncoder(tokenizer, max_bytes, by_words=False)  # type: ignore[arg-type]


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


PROMPT = "<|im_start|>assistant\n"
FIRST = turn("system", "be good") + turn("user", "the first question") + PROMPT
SECOND = FIRST + "the first answer<|im_end|>\n" + turn("user", "the second question") + PROMPT


def test_earlier_turns_are_not_tokenized_again(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, ROOM)
    assert encoder.encode(FIRST) == tokenizer.ids(FIRST)
    tokenizer.seen.clear()
    assert encoder.encode(SECOND) == tokenizer.ids(SECOND)
    assert tokenizer.seen == [
        "<|im_start|>assistant\nthe first answer",
        "<|im_start|>user\nthe second question",
    ]


def test_a_changed_turn_costs_that_turn_alone(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, ROOM)
    encoder.encode(SECOND)
    tokenizer.seen.clear()
    edited = SECOND.replace("be good", "be brief")
    assert encoder.encode(edited) == tokenizer.ids(edited)
    assert tokenizer.seen == ["<|im_start|>system\nbe brief"]


def test_a_piece_that_comes_twice_in_a_text_is_tokenized_once(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, ROOM)
    text = turn("user", "again") * 3
    assert encoder.encode(text) == tokenizer.ids(text)
    assert tokenizer.seen == ["<|im_start|>user\nagain", "<|im_end|>\n"]


def test_every_token_is_counted_as_cached_or_not(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, ROOM)
    encoder.encode(FIRST)
    first = encoder.stats.uncached_tokens
    num_ends = 2 * len(tokenizer.ids("<|im_end|>\n"))
    assert first + num_ends // 2 == len(tokenizer.ids(FIRST))
    encoder.encode(SECOND)
    stats = encoder.stats
    assert stats.cached_tokens + stats.uncached_tokens == len(tokenizer.ids(FIRST)) + len(
        tokenizer.ids(SECOND)
    )
    assert stats.misses == len(tokenizer.seen) == 6
    assert stats.hits + stats.misses == 5 + 9
    assert stats.entries == 6


def test_prompts_that_never_come_again_do_not_displace_a_chat_that_does(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, 40_000)
    encoder.encode(FIRST)
    encoder.encode(FIRST)
    for index in range(300):
        encoder.encode(turn("user", f"{index} the water " * 20) + PROMPT)
    assert encoder.stats.evictions > 100
    tokenizer.seen.clear()
    encoder.encode(FIRST)
    assert tokenizer.seen == []


def test_a_chat_out_of_use_gives_way_to_newer_chats(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, 40_000)
    encoder.encode(FIRST)
    encoder.encode(FIRST)
    for index in range(300):
        for _ in range(2):
            encoder.encode(turn("user", f"{index} the water " * 20) + PROMPT)
    tokenizer.seen.clear()
    encoder.encode(FIRST)
    assert tokenizer.seen == ["<|im_start|>system\nbe good", "<|im_start|>user\nthe first question"]


def test_the_least_recently_used_goes_first(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, 40_000)
    old, new = (turn("user", f"{name} the water " * 20) for name in ("old", "new"))
    for text in (old, new, old, new):
        encoder.encode(text)
    index = 0
    while encoder.encode(old) and old.removesuffix("<|im_end|>\n") in encoder._again and index < 300:
        for _ in range(2):
            encoder.encode(turn("user", f"{index} the water " * 20))
        index += 1
    assert index == 300  # it is used again and again
    tokenizer.seen.clear()
    encoder.encode(new)
    assert tokenizer.seen == [new.removesuffix("<|im_end|>\n")]


@pytest.mark.parametrize("word", [" water", " 水"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_accounted_bytes_equal_used_bytes(tokenizer: Watched, word: str, rounds: int) -> None:
    encoder = watched_encoder(tokenizer, 64 * ROOM)
    encoder.encode(FIRST)
    encoder.encode(FIRST)
    before = encoder.stats.bytes
    tracemalloc.start()
    try:
        for _ in range(rounds):
            for index in range(400):
                encoder.encode(turn("user", f"{index}{word * 40}"))
            tokenizer.seen.clear()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert encoder.stats.bytes - before == pytest.approx(taken, rel=0.2)


def test_what_is_held_stays_under_the_limit(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, 20_000)
    for index in range(200):
        text = turn("user", "water " * (index * 37 % 150)) + turn("user", "the " * (index % 7))
        assert encoder.encode(text) == tokenizer.ids(text)
        assert encoder.stats.bytes <= 20_000
        assert encoder._again_bytes <= 10_000


def test_a_huge_piece_is_not_kept_and_pushes_nothing_out(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, 80_000)
    encoder.encode(FIRST)
    entries = encoder.stats.entries
    huge = turn("user", "water " * 20_000)
    assert encoder.encode(huge) == tokenizer.ids(huge)
    assert encoder.stats.entries == entries
    tokenizer.seen.clear()
    encoder.encode(FIRST)
    assert tokenizer.seen == []


def test_one_text_may_bring_in_an_eighth(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, 80_000)
    text = "".join(turn("user", f"{index} water") for index in range(500))
    assert encoder.encode(text) == tokenizer.ids(text)
    assert 8_000 < encoder.stats.bytes <= 10_000


def test_a_text_of_special_tokens_is_cut_so_often_and_no_more(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, 8 * ROOM)
    text = "<|im_end|>" * 10_000
    assert encoder.encode(text) == (2,) * 10_000
    assert tokenizer.seen == ["<|im_end|>", "<|im_end|>" * (10_000 - 4095)]


def test_no_room_means_nothing_kept(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, 0)
    for _ in range(2):
        assert encoder.encode(FIRST) == tokenizer.ids(FIRST)
    assert encoder.stats.entries == encoder.stats.bytes == 0


@pytest.mark.parametrize("text", ["", " ", "no special token", "<|im_end|>", "<|im_", "|>", "a<|im_end|>"])
def test_edges(tokenizer: Watched, text: str) -> None:
    encoder = watched_encoder(tokenizer, ROOM)
    for _ in range(3):
        assert encoder.encode(text) == tokenizer.ids(text)


def test_half_a_surrogate_pair_is_the_callers_fault(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, ROOM)
    with pytest.raises(InvalidRequest, match="surrogate"):
        encoder.encode(FIRST + "\ud800")
    assert encoder.encode(FIRST) == tokenizer.ids(FIRST)


def test_others_go_on_while_a_long_text_is_tokenized(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, ROOM)
    encoder.encode(FIRST)
    num_before = encoder.stats.entries
    waiting, go_on = Event(), Event()

    def hold(texts: list[str]) -> None:
        if texts == ["a long text"]:
            waiting.set()
            assert go_on.wait(10)

    tokenizer.before = hold
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(encoder.encode, "a long text")
        assert waiting.wait(10)
        assert encoder.encode(SECOND) == tokenizer.ids(SECOND)
        num_kept = encoder.stats.entries
        assert num_kept > num_before
        go_on.set()
        assert long.result(10) == tokenizer.ids("a long text")
    assert encoder.stats.entries == num_kept + 1


def test_threads_get_what_one_would(tokenizer: Watched) -> None:
    encoder = watched_encoder(tokenizer, 6_000)
    texts = [
        "".join(turn("user", f"{n % 7} the water" * (n % 5)) for n in range(at, at + 4)) for at in range(40)
    ]
    expected = [tokenizer.ids(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        rounds = pool.map(lambda _: [encoder.encode(text) for text in texts], range(12))
        assert all(got == expected for got in rounds)
    accounted = [num_bytes for part in (encoder._once, encoder._again) for _, num_bytes in part.values()]
    assert encoder.stats.bytes == sum(accounted) <= 6_000


def test_an_id_past_the_size_of_the_vocabulary(tokenizer: Watched) -> None:
    model = models.WordLevel({"a": 0, "b": 5000}, unk_token="a")
    holes = Tokenizer(model)
    holes.pre_tokenizer = pre_tokenizers.Whitespace()
    holes.add_special_tokens([AddedToken("<s>", normalized=False)])
    encoder = CachedEncoder(holes, ROOM)
    assert encoder.exact
    for _ in range(3):
        assert encoder.encode("<s>a b") == tuple(holes.encode("<s>a b", add_special_tokens=False).ids)


class PythonPreTokenizer:
    def pre_tokenize(self, text: object) -> None: ...


def sampling(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.5


def python_stage(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(PythonPreTokenizer())


def special_as_text(tokenizer: Tokenizer) -> None:
    tokenizer.encode_special_tokens = True


def long_special(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<" * 300, normalized=False)])


def truncating(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(10)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (sampling, "samples"),
        (python_stage, "cannot be read"),
        (special_as_text, "as text"),
        (long_special, "256 characters"),
        (truncating, "truncates"),
    ],
)
def test_what_cannot_be_cut_is_tokenized_whole(change: Callable[[Tokenizer], None], note: str) -> None:
    tokenizer = Watched()
    change(tokenizer._tokenizer)
    encoder = watched_encoder(tokenizer, ROOM)
    assert not encoder.exact
    assert note in (encoder.note or "")
    tokenizer.seen.clear()
    encoder.encode(FIRST)
    encoder.encode(FIRST)
    assert tokenizer.seen == [FIRST, FIRST]
    assert (encoder.stats.hits, encoder.stats.misses, encoder.stats.bytes) == (0, 2, 0)
    assert encoder.stats.uncached_tokens > 0


class Stage:
    """Of a later version of the library."""

    def __getstate__(self) -> bytes:
        return b'{"type": "Telepathy"}'


@pytest.mark.parametrize("name", ["pre_tokenizer", "post_processor"])
def test_a_stage_not_known_is_not_trusted(tokenizer: Watched, name: str) -> None:
    setattr(tokenizer, name, Stage())
    encoder = watched_encoder(tokenizer, ROOM)
    assert not encoder.exact
    assert "Telepathy is unknown" in (encoder.note or "")


def test_a_tokenizer_that_looks_right_is_tried(tokenizer: Watched) -> None:
    encode = tokenizer._tokenizer.encode
    tokenizer.encode = lambda text, **options: encode(text.replace("a<|im_end|>", "b"), **options)
    encoder = watched_encoder(tokenizer, ROOM)
    assert not encoder.exact
    assert "changed its tokens" in (encoder.note or "")


@pytest.mark.parametrize(
    ("tokens", "text", "found"),
    [
        (["<a>", "<ab>"], "<a><ab>", ["<a>", "<ab>"]),
        (["<s", "<s>", "<s><s>"], "<s<s><s><s>", ["<s", "<s><s>", "<s>"]),
        (["ab", "abcd"], "abcabcd", ["ab", "abcd"]),
        (["ab", "b"], "abb", ["ab", "b"]),
        (["[x]", "(.)", "a|b"], "[x](.)a|bx.", ["[x]", "(.)", "a|b"]),
    ],
)
def test_the_leftmost_and_then_the_longest_token_is_found(
    tokens: list[str], text: str, found: list[str]
) -> None:
    assert re.findall(longest_of(tokens), text) == found
