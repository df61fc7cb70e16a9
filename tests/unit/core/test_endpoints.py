"""Component names: one per (model, role, card), and always an address."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvolt.core.endpoints import CARD, GENERATE, EndpointAddress, component_name
from kvolt.core.ids import CardHash
from kvolt.core.request import Role

MODELS = st.text(st.characters(codec="utf-8"), max_size=80)
CARDS = st.text("0123456789abcdef", min_size=1, max_size=32).map(CardHash)
KINDS = st.tuples(MODELS, st.sampled_from(Role), CARDS)


@given(KINDS, KINDS)
@example(("a/b", Role.PREFILL, CardHash("1")), ("a-b", Role.PREFILL, CardHash("1")))
@example(("A", Role.PREFILL, CardHash("1")), ("a", Role.PREFILL, CardHash("1")))
@example(("", Role.PREFILL, CardHash("1")), ("model", Role.PREFILL, CardHash("1")))
@example(("m", Role.PREFILL, CardHash("1")), ("m", Role.DECODE, CardHash("1")))
@example(("m", Role.PREFILL, CardHash("1")), ("m", Role.PREFILL, CardHash("2")))
@example(("m/prefill/1", Role.PREFILL, CardHash("2")), ("m", Role.PREFILL, CardHash("1/prefill/2")))
def test_different_workers_have_different_names(
    one: tuple[str, Role, CardHash], other: tuple[str, Role, CardHash]
) -> None:
    assert (component_name(*one) == component_name(*other)) == (one == other)


@given(KINDS)
@example(("日本語", Role.AGGREGATED, CardHash("1")))
@example(("x" * 200, Role.AGGREGATED, CardHash("f" * 32)))
@example(("--", Role.AGGREGATED, CardHash("1")))
def test_a_name_is_part_of_an_address(kind: tuple[str, Role, CardHash]) -> None:
    for endpoint in (GENERATE, CARD):
        text = f"default.{component_name(*kind)}.{endpoint}"
        assert str(EndpointAddress.parse(text)) == text


def test_the_model_can_be_read_in_it() -> None:
    name = component_name("Qwen/Qwen3-8B", Role.DECODE, CardHash("1"))
    assert name.startswith("qwen-qwen3-8b-decode-")
