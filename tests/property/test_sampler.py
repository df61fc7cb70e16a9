"""Whatever is asked together: a row's token is the same alone and in any company, and one that may come.
Whatever the grammar: constrained random choices end in output that follows it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvolt.core.request import Grammar, GrammarKind, Sampling
from kvolt.engines.native.grammar.compiler import GrammarCompiler
from kvolt.engines.native.sampling.sampler import Row, sample
from kvolt.engines.sim.model import EOS, tokenizer_json

VOCABULARY = 300
TOKENS = st.integers(0, VOCABULARY + 20)
"""Some are not in the vocabulary."""


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5]),
    "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.3, 0.01]),
    "top_k": st.sampled_from([None, None, 1, 7, 299, 1000]),
    "min_p": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7]),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.5, 0.7]),
    "logit_bias": st.dictionaries(TOKENS, st.floats(-20, 20, width=32), max_size=3),
    "allowed_token_ids": st.none() | st.lists(TOKENS, max_size=20).map(tuple),
    "logprobs": st.sampled_from([None, None, 0, 3]),
}
"""A new field that filters or changes logits also belongs in `edited` or `possible`."""


def test_rows_have_all_fields_that_a_row_can_have() -> None:
    """Rows have seeds of their own; choices and prompts are no matter of one row."""
    assert FIELDS.keys() == {*Sampling.__struct_fields__} - {"seed", "num_choices", "prompt_logprobs"}


@st.composite
def rows(draw: st.DrawFn) -> Row:
    asked = Sampling(**{name: draw(values) for name, values in FIELDS.items()})
    masked = draw(st.none() | st.integers(0, 2**32 - 1))
    mask = None
    if masked is not None:
        bits = np.random.default_rng(masked).integers(0, 2, 320, dtype=np.uint8)
        mask = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
    return Row(
        asked,
        seed=draw(st.integers(-(2**70), 2**70)),
        choice=draw(st.integers(0, 4)),
        position=draw(st.integers(0, 10_000)),
        prompt=draw(st.lists(TOKENS, max_size=6)),
        output=draw(st.lists(TOKENS, max_size=6)),
        banned=draw(st.lists(TOKENS, max_size=3)),
        mask=mask,
    )


def edited(logits: np.ndarray[Any, np.dtype[np.float32]], row: Row) -> list[float]:
    """The logits after all changes, one token after the other."""
    asked, changed = row.sampling, list[float]()
    bits = None if row.mask is None else np.unpackbits(row.mask.numpy().view(np.uint8), bitorder="little")
    for token, raw in enumerate(logits.tolist()):
        value = raw
        if token in row.prompt or token in row.output:
            value = value / asked.repetition_penalty if value > 0 else value * asked.repetition_penalty
        count = list(row.output).count(token)
        value -= count * asked.frequency_penalty + (count > 0) * asked.presence_penalty
        value += asked.logit_bias.get(token, 0.0)
        allowed = asked.allowed_token_ids is None or token in asked.allowed_token_ids
        allowed = allowed and token not in row.banned and (bits is None or bits[token] == 1)
        changed.append(value if allowed else -np.inf)
    return changed


def possible(changed: Sequence[float], asked: Sampling) -> set[int]:
    """Tokens that may be drawn, those at the very edge of a filter included."""
    slack = 1e-4
    order = sorted((t for t, value in enumerate(changed) if value > -np.inf), key=lambda t: -changed[t])
    if not order:
        return set()
    best = changed[order[0]]
    if asked.temperature == 0:
        return {token for token in order if changed[token] >= best - slack}
    weights = {token: np.exp((changed[token] - best) / asked.temperature) for token in order}
    if asked.top_k is not None and asked.top_k < len(order):
        last = weights[order[asked.top_k - 1]]
        order = [token for token in order if weights[token] >= last * (1 - slack)]
    whole = sum(weights[token] for token in order)
    kept: set[int] = set()
    mass = 0.0
    least = 0.0
    for token in order:
        if kept and mass >= asked.top_p * whole * (1 + slack) and weights[token] < least * (1 - slack):
            break
        kept.add(token)
        mass += weights[token]
        least = weights[token]
    return {token for token in kept if weights[token] >= asked.min_p * (1 - slack)}


@settings(max_examples=80, deadline=None)
@given(
    asked=st.lists(rows(), min_size=1, max_size=8),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
)
def test_alone_or_together_a_row_gets_the_same_possible_token(
    asked: list[Row], seed: int, spread: float
) -> None:
    logits = torch.randn(len(asked), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread
    together = sample(logits, asked)
    backwards = sample(logits.flip(0), asked[::-1])[::-1]
    for number, (row, result) in enumerate(zip(asked, together, strict=True)):
        (alone,) = sample(logits[number : number + 1], [row])
        assert alone.token == result.token == backwards[number].token
        expected = possible(edited(logits[number].numpy(), row), row.sampling)
        if result.token is None:
            assert not expected
            assert result.failure
        else:
            assert result.token in expected
            assert (result.logprobs is None) == (row.sampling.logprobs is None)


# --- grammars ---

TOKENIZER = Tokenizer.from_buffer(tokenizer_json())
CLOSING = [EOS, *(TOKENIZER.token_to_id(mark) for mark in '"}]')]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json(), TOKENIZER.get_vocab_size(), [EOS])


def walk(grammar: Grammar, seed: int) -> str:
    """Random tokens that the grammar allows; after a while those that close something are preferred."""
    matcher = compiler().compile(grammar).start()
    generator = torch.Generator().manual_seed(seed)
    mask = torch.empty(compiler().mask_words, dtype=torch.int32)
    output: list[int] = []
    for position in range(2000):
        logits = torch.randn(1, TOKENIZER.get_vocab_size(), generator=generator)
        if position >= 12:
            logits[0, CLOSING] += torch.tensor([30.0, 20.0, 20.0, 20.0])
        matcher.fill(mask)
        (result,) = sample(logits, [Row(Sampling(), seed, position=position, mask=mask)])
        assert result.token is not None, (result.failure, matcher.error)
        assert matcher.accept(result.token)
        if result.token == EOS:
            return TOKENIZER.decode(output, skip_special_tokens=False)
        output.append(result.token)
    raise AssertionError(f"no end: {TOKENIZER.decode(output[:200])!r}")


SIMPLE = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -3, "maximum": 250},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{1,4}$"},
        {"type": "string", "format": "date"},
        {"enum": ["one", 2, None, ["x"]]},
        {"const": {"deep": [1]}},
    ]
)


def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def as_object(properties: dict[str, Any], closed: bool, required: bool) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "object", "properties": properties}
        if closed:
            made["additionalProperties"] = False
        if required:
            made["required"] = list(properties)
        return made

    names = st.sampled_from(["a", "name", "x y", 'q"', "é", "format"])
    objects = st.builds(as_object, st.dictionaries(names, inner, max_size=3), st.booleans(), st.booleans())
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": 3},
        inner,
        st.integers(0, 2),
    )
    either = st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas})
    return objects | arrays | either


@settings(max_examples=60, deadline=None)
@given(schema=st.recursive(SIMPLE, containers, max_leaves=6), seed=st.integers(0, 10**6))
def test_constrained_output_follows_its_schema(schema: dict[str, Any], seed: int) -> None:
    output = walk(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), seed)
    jsonschema.validate(json.loads(output), schema)


ATOMS = st.sampled_from(
    ["a", "bc", r"\d", r"\w", r"[x-z_]", r"[^a-y\s]", r"\.", "é", "/", r"(?:)", " ", r"\x7b"]
)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=3)
    repeats = st.sampled_from(["?", "{2}", "{0,3}", "{,2}", "{1,4}?"])
    return (
        several.map("".join)
        | several.map(lambda parts: f"({'|'.join(parts)})")
        | st.builds(lambda part, repeat: f"(?:{part}){repeat}", inner, repeats)
    )


@settings(max_examples=80, deadline=None)
@given(
    pattern=st.recursive(ATOMS, combined, max_leaves=8), anchored=st.booleans(), seed=st.integers(0, 10**6)
)
def test_constrained_output_matches_its_pattern(pattern: str, anchored: bool, seed: int) -> None:
    pattern = f"^(?:{pattern})$" if anchored else pattern
    output = walk(Grammar(GrammarKind.REGEX, pattern), seed)
    assert re.fullmatch(pattern, output, re.ASCII), output
