"""Text cut at added tokens: as a tokenizer cuts it, and the same however it comes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from kvolt.frontend.processors.added_tokens import AddedTokens, TokenCut

TOKENS = ["<a>", "<a>b", ">><c", "><d", "<think>", "</think>", "</", "bb"]


def tokens(*names: str) -> AddedTokens:
    tokenizer = Tokenizer(BPE())
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    return AddedTokens(tokenizer)


def cut(added: AddedTokens, parts: list[str]) -> list[str]:
    """Tokens, and the text between them in one piece each."""
    cutter = added.cutter()
    cuts: list[TokenCut] = []
    for part in parts:
        cuts += cutter.feed(part)
    found: list[str] = []
    was_text = False
    for text, token_id in cuts + cutter.finish():
        if token_id is None and was_text:
            found[-1] += text
        else:
            found.append(text)
        was_text = token_id is None
    return found


def test_tokens_come_alone_and_with_their_ids() -> None:
    added = tokens("<think>", "</think>")
    cutter = added.cutter()
    assert cutter.feed("<think>a</th") == [TokenCut("<think>", 0), TokenCut("a", None)]
    assert cutter.feed("ink>b") == [TokenCut("</think>", 1), TokenCut("b", None)]
    assert cutter.feed("<thin") == []
    assert cutter.feed("g <") == [TokenCut("<thing ", None)]
    assert cutter.finish() == [TokenCut("<", None)]
    assert cutter.finish() == []


def test_the_longest_of_a_place_wins_and_the_first_of_two() -> None:
    added = tokens(*TOKENS)
    assert cut(added, ["x<a>", "b"]) == ["x", "<a>b"]
    assert cut(added, ["x<a>", "c"]) == ["x", "<a>", "c"]
    assert cut(added, ["<a", ">>", "<d"]) == ["<a>", "><d"]  # not >><c, which began inside another
    assert cut(added, ["<a>><"]) == ["<a>", "><"]


def test_without_tokens_all_is_text() -> None:
    assert tokens().cutter().feed("a<b") == [TokenCut("a<b", None)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["<", ">", "a", "b", "c", "d", "/", "think", *TOKENS]), max_size=12), st.data()
)
def test_it_is_the_tokenizers_cut_however_the_text_comes(parts: list[str], data: st.DataObject) -> None:
    added = tokens(*TOKENS)
    text = "".join(parts)
    whole = cut(added, [text])
    assert "".join(whole) == text
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]
    assert cut(added, pieces) == whole
    assert cut(added, list(text)) == whole
    tokenizer = Tokenizer(BPE())
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in TOKENS])
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert [added.ids[part] for part in whole if part in added.ids] == ids


def test_no_more_is_held_back_than_a_token_is_long() -> None:
    cutter = tokens(*TOKENS).cutter()
    told = 0
    for number, character in enumerate("<thin<thin<</thi</th" * 20, 1):
        told += sum(len(text) for text, _ in cutter.feed(character))
        assert number - told < len("</think>")
