"""Between text and tokens: nothing is lost either way, also a piece at a time."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvolt.core.errors import InvalidRequest
from kvolt.engines.sim_model import SPECIAL, sim_card, tokenizer_json
from kvolt.frontend.openai import ChatMessage
from kvolt.frontend.text import Codec

CARD = sim_card("m", 1000, 16)
CODEC = Codec(CARD)
TEXT = st.text(st.characters(codec="utf-8")).filter(
    lambda text: not any(special in text for special in SPECIAL)
)


@given(TEXT)
@example("héllo 日本語 🎉 👩‍👩‍👧 the water")
@example("\x00\u0301 \r\n\t  ")
def test_any_text_survives_at_once_and_token_by_token(text: str) -> None:
    ids = CODEC.encode(text)
    assert CODEC.decoder().step(ids) == text
    one_by_one = CODEC.decoder()
    pieces = [one_by_one.step((token,)) for token in ids]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)


@given(TEXT, st.data())
def test_the_cut_into_steps_does_not_matter(text: str, data: st.DataObject) -> None:
    ids = CODEC.encode(text)
    decoder = CODEC.decoder()
    got = ""
    start = 0
    while start < len(ids):
        end = data.draw(st.integers(start + 1, len(ids)))
        got += decoder.step(ids[start:end])
        start = end
    assert got == text


def test_half_of_a_character_is_held_back() -> None:
    decoder = CODEC.decoder()
    ids = CODEC.encode("🎉")
    assert len(ids) == 4
    assert [decoder.step((token,)) for token in ids] == ["", "", "", "🎉"]


@given(st.lists(st.integers(0, CODEC.vocabulary_size - 1), max_size=40))
def test_any_tokens_decode_to_what_they_are_together(ids: list[int]) -> None:
    """Also bytes that are no character; only an unfinished end is missing."""
    whole = CODEC._tokenizer.decode(ids)
    got = CODEC.decoder().step(ids)
    assert whole.startswith(got)
    assert set(whole[len(got) :]) <= {"\ufffd"}


def test_decoders_do_not_share_state() -> None:
    one, other = CODEC.decoder(), CODEC.decoder()
    first, second = CODEC.encode("🎉"), CODEC.encode("日")
    got = [one.step(first[:2]), other.step(second[:1]), one.step(first[2:]), other.step(second[1:])]
    assert got == ["", "", "🎉", "日"]


def test_the_vocabulary_reaches_to_its_highest_id() -> None:
    """Real vocabularies have holes: their highest id is over their number of tokens."""
    document = json.loads(tokenizer_json())
    assert CODEC.vocabulary_size == len(document["model"]["vocab"])
    token = max(document["model"]["vocab"], key=document["model"]["vocab"].get)
    document["model"]["vocab"][token] = 5000
    codec = Codec(replace(CARD, tokenizer_json=json.dumps(document).encode()))
    assert codec.vocabulary_size == 5001


@given(st.text(st.sampled_from(" thewatrofandin"), min_size=1, max_size=300))
def test_what_fits_is_never_called_too_long(text: str) -> None:
    num_tokens = len(CODEC.encode(text))
    tight = Codec(sim_card("m", num_tokens, 16))
    assert len(text) <= tight.most_characters


def test_the_template_renders_a_conversation() -> None:
    messages = [ChatMessage(role="system", content="be kind"), ChatMessage(role="user", content="hi")]
    assert CODEC.render(messages) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.more }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0]['content'] | int(1) / 0 }}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault(template: str) -> None:
    codec = Codec(replace(CARD, chat_template=template))
    with pytest.raises(InvalidRequest) as caught:
        codec.render([ChatMessage(role="user", content="hi")])
    assert caught.value.fields["param"] == "messages"
