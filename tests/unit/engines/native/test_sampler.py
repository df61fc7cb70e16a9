from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvolt.core.errors import InvalidRequest
from kvolt.core.request import Sampling
from kvolt.engines.native.sampling.draw import Draws, draw_on_device, draw_on_host
from kvolt.engines.native.sampling.logprobs import prompt_logprobs
from kvolt.engines.native.sampling.sampler import (
    _BOUNDS,
    Filter,
    Row,
    _draws,
    _filter,
    check_sampling,
    prepare,
    sample,
)
from kvolt.testing.engines.suite import SAMPLING_VALUES

NAN, INF = math.nan, math.inf
NO_LIMIT = 1 << 40


def row(
    *,
    seed: int = 1,
    position: int = 0,
    choice: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
    mask: torch.Tensor | None = None,
    processors: Sequence[Any] = (),
    **asked: Any,
) -> Row:
    asked.setdefault("temperature", 0.0)
    return Row(
        Sampling(**asked),
        seed,
        choice,
        position,
        prompt=prompt,
        output=output,
        banned=banned,
        mask=mask,
        processors=processors,
    )


def tokens(logits: torch.Tensor, rows: Sequence[Row]) -> list[int | None]:
    return [sampled.token for sampled in sample(logits, rows)]


def bitmask(allowed: Sequence[int], words: int) -> torch.Tensor:
    mask = np.zeros(words, dtype=np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(mask.view(np.int32))


# --- fields ---

OTHER_FIELDS = {
    *(
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
    ),  # edits
    *("seed", "num_choices", "logprobs", "prompt_logprobs"),
}
"""Fields of `Sampling` that do not filter the tokens to draw from."""
FILTERS = sorted({*Sampling.__struct_fields__} - OTHER_FIELDS - {"temperature"})


class Recorder:
    """Sampling parameters that remember which of them were read."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(Sampling(), name)


def test_filters_read_every_field_that_filters() -> None:
    """A new field of `Sampling` counts as a filter until OTHER_FIELDS names it."""
    fields = {*FILTERS, "temperature"}
    chosen, drawn = Recorder(), Recorder()
    _filter(chosen)  # type: ignore[arg-type]
    plain = row()
    plain.sampling = drawn  # type: ignore[assignment]
    _draws([plain])
    assert chosen.names == fields, "_filter decides which weights the filters of a row need"
    assert drawn.names == fields, "_draws collects the values that draw.py filters by"


# --- greedy and what changes logits ---


def test_greedy_takes_the_first_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 2.0, 5.0]])
    assert tokens(logits, [row(), row()]) == [1, 0]
    assert tokens(logits, [row(temperature=1e-6), row(temperature=0.0)]) == [1, 0]
    assert sample(logits[:0], []) == []


def test_logits_are_not_changed() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    sample(logits, [row(logit_bias={1: 5.0}), row(temperature=1.0, top_p=0.5), row(repetition_penalty=2.0)])
    assert torch.equal(logits, before)


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0, -1.5]])
    assert tokens(logits, [row(repetition_penalty=2.0, prompt=[0])]) == [1]
    assert tokens(logits, [row(repetition_penalty=2.0, output=[0, 0, 0])]) == [1]  # however often
    negative = torch.tensor([[-1.0, -1.5]])
    assert tokens(negative, [row(repetition_penalty=2.0, prompt=[0])]) == [1]


def test_presence_and_frequency_penalties_count_output_only() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0]])
    assert tokens(logits, [row(presence_penalty=1.5, prompt=[0, 0], output=[])]) == [0]
    assert tokens(logits, [row(presence_penalty=1.5, output=[0])]) == [1]
    assert tokens(logits, [row(presence_penalty=1.5, output=[0, 0, 0, 1])]) == [0]  # 2.5, 1.5, 2.0
    assert tokens(logits, [row(frequency_penalty=0.6, output=[0, 0])]) == [1]
    assert tokens(logits, [row(frequency_penalty=0.4, output=[0, 0])]) == [0]


def test_penalties_together_with_bias() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0]])
    # 4 / 2 - (2 * 0.25 + 0.5) + 3 = 4; 3; 2 + 2.5 = 4.5
    asked = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    assert tokens(logits, [row(**asked, output=[0, 0], logit_bias={0: 3.0, 2: 2.5})]) == [2]
    assert tokens(logits, [row(**asked, output=[0, 0], logit_bias={0: 3.0, 2: 1.5})]) == [0]


def test_bias_allowed_and_banned_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert tokens(logits, [row(logit_bias={0: 100.0})]) == [0]
    assert tokens(logits, [row(logit_bias={3: -100.0, 77: 5.0})]) == [2]
    assert tokens(logits, [row(allowed_token_ids=(0, 1, 99))]) == [1]
    assert tokens(logits, [row(banned=[3, 2, 99])]) == [1]
    assert tokens(logits, [row(allowed_token_ids=(1, 3), banned=[3])]) == [1]


@pytest.mark.parametrize("vocabulary", [4, 31, 32, 33, 100, 257, 512])
def test_a_mask_allows_just_its_tokens(vocabulary: int) -> None:
    words = -(-vocabulary // 32)
    logits = torch.randn(1, vocabulary)
    for token in {0, 3, vocabulary // 2, vocabulary - 1}:
        assert tokens(logits, [row(mask=bitmask([token], words))]) == [token]
        assert tokens(logits, [row(mask=bitmask([token], words), temperature=1.0)]) == [token]
    both = row(mask=bitmask([0, 1, 2], words), allowed_token_ids=(2, 3))
    assert tokens(logits, [both]) == [2]


def test_masks_of_other_lengths_than_the_vocabulary() -> None:
    logits = torch.arange(64.0).unsqueeze(0)
    assert tokens(logits, [row(mask=bitmask([5, 63], 1 + 1))]) == [63]
    assert tokens(logits, [row(mask=bitmask([5], 1))]) == [5]  # too short: the rest is not allowed
    assert tokens(logits, [row(mask=bitmask([5, 70], 3))]) == [5]  # too long: there is no token 70
    assert tokens(logits, [row(mask=bitmask([5, 70], 3), allowed_token_ids=(5,))]) == [5]


def test_processors_come_last_and_may_force_a_token() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def force(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        seen.append((list(prompt), list(output)))
        assert logits.tolist() == [-INF, 3.0, 2.0]
        logits[2] = INF

    logits = torch.tensor([[4.0, 3.0, 2.0]])
    for temperature in (0.0, 1.0):
        asked = row(processors=[force], banned=[0], prompt=[7], output=[8], temperature=temperature)
        assert tokens(logits, [asked]) == [2]
    assert seen == [([7], [8])] * 2


def test_a_processor_that_fails_fails_its_row_only() -> None:
    def broken(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        raise KeyError("oops")

    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    good, bad = sample(logits, [row(), row(processors=[broken])])
    assert (good.token, good.failure) == (1, None)
    assert bad.token is None
    assert bad.failure == "logits processor function failed: KeyError: 'oops'"


def test_a_kept_row_counts_on_as_a_fresh_one_counts() -> None:
    torch.manual_seed(0)
    asked = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    prompt, output = [1, 2, 3, 200], list[int]()
    kept = row(**asked, prompt=prompt, output=output)
    for position in range(120):
        logits = torch.randn(1, 90) * 2
        fresh = row(**asked, prompt=prompt, output=list(output), position=position)
        kept.position = position
        expected = tokens(logits, [fresh])
        assert tokens(logits, [kept]) == expected
        assert isinstance(expected[0], int)
        output.append(expected[0])
    assert len(set(output)) > 64  # more than the counts have room for at first
    kept.output = output[:10]
    logits = torch.randn(1, 90)
    assert tokens(logits, [kept]) == tokens(logits, [row(**asked, prompt=prompt, output=output[:10])])


# --- rows that cannot be chosen ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"top_k": 2, "min_p": 0.1}, {"logprobs": 2}])
def test_rows_without_a_sound_choice_fail_alone(temperature: float, extra: dict[str, Any]) -> None:
    logits = torch.tensor(
        [[1.0, 5.0, 2.0], [1.0, NAN, 2.0], [1.0, INF, 2.0], [-INF, -INF, -INF], [-INF, 4.0, -INF], [NAN] * 3]
    )
    results = sample(logits, [row(temperature=temperature, **extra) for _ in logits])
    failed = [result.token is None for result in results]
    assert failed == [False, True, True, True, False, True]
    assert results[4].token == 1
    for number in (1, 2, 5):
        assert results[number].failure == "the model's logits are not finite"
        assert results[number].logprobs is None
    assert "no token is allowed" in (results[3].failure or "")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_whose_every_token_is_masked(temperature: float) -> None:
    logits = torch.randn(2, 64)
    empty = row(mask=bitmask([], 2), temperature=temperature)
    full = row(banned=range(64), temperature=temperature)
    for result in sample(logits, [empty, full]):
        assert result.token is None
        assert "no token is allowed" in (result.failure or "")


def test_tiny_and_huge_temperatures() -> None:
    logits = torch.tensor([[90_000.0, 89_999.0, -5e4]])
    assert tokens(logits, [row(temperature=1e-5, position=at) for at in range(1)]) == [0]
    wide = torch.tensor([[30.0, -30.0]]).repeat(64, 1)
    drawn = tokens(wide, [row(temperature=1e6, position=at) for at in range(64)])
    assert set(drawn) == {0, 1}


# --- drawing ---


def draws(count: int, **given: Any) -> Draws:
    rng = np.random.default_rng(3)
    filled = {
        "uniforms": rng.random(count),
        "inverse_temperatures": np.ones(count),
        "top_k": np.full(count, NO_LIMIT),
        "top_p": np.ones(count),
        "min_p": np.zeros(count),
    }
    return Draws(
        **{**filled, **{name: np.broadcast_to(np.array(v), count).copy() for name, v in given.items()}}
    )


def test_inverse_cdf_in_token_order() -> None:
    vocabulary = 1000
    logits = torch.randn(400, vocabulary, generator=torch.Generator().manual_seed(5)) * 3
    given = draws(400, inverse_temperatures=1 / 0.8)
    found = draw_on_host(logits, None, given, filtered=False).tokens
    exact = torch.softmax(logits.double() / 0.8, dim=-1).cumsum(dim=-1)
    for number, token in enumerate(found.tolist()):
        below = float(exact[number, token - 1]) if token else 0.0
        assert below - 1e-6 <= given.uniforms[number] <= float(exact[number, token]) + 1e-6


def test_uniform_numbers_at_both_ends() -> None:
    logits = torch.full((2, 300), -INF)
    logits[:, 7] = 0.0
    logits[:, 290] = -1.0
    given = draws(2)
    given.uniforms = np.array([0.0, 1 - 2**-53])
    for found in (draw_on_host(logits, None, given, False), draw_on_device(logits, given, False)):
        assert found.tokens.tolist() == [7, 290]


def kept_set(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """What may be drawn, by the definition: a sort and a running sum."""
    order = torch.argsort(logits, descending=True).tolist()
    chances = torch.softmax(logits.double(), dim=-1).tolist()
    order = order[:top_k]
    whole = sum(chances[token] for token in order)
    kept: set[int] = set()
    mass = 0.0
    for token in order:
        if mass >= top_p * whole and kept:
            break
        kept.add(token)
        mass += chances[token]
    return {token for token in kept if chances[token] >= min_p * chances[order[0]]}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (5, 1.0, 0.0),
        (400, 1.0, 0.0),
        (NO_LIMIT, 0.5, 0.0),
        (NO_LIMIT, 0.95, 0.0),
        (NO_LIMIT, 0.0, 0.0),
        (10, 0.6, 0.0),
        (NO_LIMIT, 1.0, 0.3),
        (8, 0.9, 0.2),
    ],
)
@pytest.mark.parametrize("vocabulary", [40, 600])
def test_filters_keep_what_they_should(vocabulary: int, top_k: int, top_p: float, min_p: float) -> None:
    base = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    count = 300
    given = draws(count, top_k=top_k, top_p=top_p, min_p=min_p)
    given.uniforms = (np.arange(count) + 0.5) / count
    logits = base.unsqueeze(0).expand(count, -1)
    host = draw_on_host(logits, None, given, filtered=True).tokens
    device = draw_on_device(logits, given, filtered=True).tokens
    assert torch.equal(host, device)
    expected = kept_set(base, top_k, top_p, min_p)
    found = set(host.tolist())
    assert found <= expected
    chances = torch.softmax(base.double(), dim=-1)
    whole = float(chances[list(expected)].sum())
    for token in expected:
        share = float((host == token).double().mean())
        assert share == pytest.approx(float(chances[token]) / whole, abs=1.1 / count), token


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("others", [{}, {"top_k": 30}, {"top_p": 0.99}, {"min_p": 0.01}])
def test_each_filter_leaves_fewer_tokens(name: str, others: dict[str, Any]) -> None:
    """Also where the other filters do nothing, and `draw.py` may return before it reaches this one."""
    count = 300
    logits = torch.arange(40.0).mul(0.2).expand(count, -1)

    def kept(on_host: bool, fields: dict[str, Any]) -> set[int]:
        asked = row(temperature=1.0, **fields)
        given = _draws([asked] * count)
        given.uniforms = (np.arange(count) + 0.5) / count
        filtered = asked.filter != Filter.NONE
        picked = (
            draw_on_host(logits, None, given, filtered)
            if on_host
            else draw_on_device(logits, given, filtered)
        )
        return set(picked.tokens.tolist())

    for on_host in (True, False):
        assert kept(on_host, {**others, name: SAMPLING_VALUES[name]}) < kept(on_host, others)


def test_a_nucleus_larger_than_the_first_look() -> None:
    base = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 0.01
    given = draws(60, top_p=0.5)
    found = draw_on_host(base.unsqueeze(0).expand(60, -1), None, given, filtered=True).tokens
    assert set(found.tolist()) <= kept_set(base, NO_LIMIT, 0.5, 0.0)
    assert torch.equal(found, draw_on_device(base.unsqueeze(0).expand(60, -1), given, True).tokens)


def test_top_p_holds_where_top_k_leaves_all_that_is_allowed() -> None:
    logits = torch.arange(10.0).unsqueeze(0).expand(200, -1).clone()
    logits[:, 0] = -INF
    given = draws(200, top_k=10, top_p=0.1)
    assert set(draw_on_host(logits, None, given, True).tokens.tolist()) == {9}
    assert set(draw_on_device(logits, given, True).tokens.tolist()) == {9}


def test_equal_weights_stay_or_go_together() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]]).expand(300, -1)
    given = draws(300, top_k=2)
    assert set(draw_on_host(logits, None, given, True).tokens.tolist()) == {0, 1, 2}
    assert set(draw_on_device(logits, given, True).tokens.tolist()) == {0, 1, 2}


def test_a_token_depends_on_seed_choice_and_position() -> None:
    logits = torch.zeros(1, 50_000)
    base = tokens(logits, [row(temperature=1.0, seed=1)])
    for other in (
        row(temperature=1.0, seed=2),
        row(temperature=1.0, choice=1),
        row(temperature=1.0, position=1),
    ):
        assert tokens(logits, [other]) != base
    assert tokens(logits, [row(temperature=1.0, seed=1)]) == base


# --- alone or in a batch ---


def mixed_rows(count: int) -> list[Row]:
    rng = np.random.default_rng(8)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 0.9, "presence_penalty": 0.5, "top_p": 0.8, "top_k": 50},
        {"logit_bias": {3: 4.0}, "logprobs": 2},
        {"temperature": 1.0, "allowed_token_ids": (1, 5, 9)},
    ]
    return [
        row(
            seed=int(rng.integers(1 << 40)),
            position=number,
            prompt=rng.integers(900, size=5).tolist(),
            output=rng.integers(900, size=5).tolist(),
            banned=[2] if number % 5 == 0 else [],
            **kinds[number % len(kinds)],
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("vocabulary", [1024, 5003])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(vocabulary: int, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        logits = torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(2)) * 2
        rows = mixed_rows(40)
        together = tokens(logits, rows)
        assert together == [tokens(logits[n : n + 1], [one])[0] for n, one in enumerate(rows)]
        backwards = tokens(logits.flip(0), rows[::-1])
        assert together == backwards[::-1]
        some = [1, 2, 3, 11, 12, 30]
        assert [together[n] for n in some] == tokens(logits[some], [rows[n] for n in some])
    finally:
        torch.set_num_threads(before)


def test_one_plan_can_be_prepared_before_its_logits() -> None:
    rows = mixed_rows(16)
    logits = torch.randn(16, 900)
    plan = prepare(rows, 900, "cpu")
    chosen = plan.choose(logits)
    collected = chosen.collect()
    assert chosen.tokens.tolist() == [sampled.token for sampled in collected]
    assert collected == sample(logits, rows)


def test_half_precision_logits() -> None:
    logits = torch.randn(8, 900).bfloat16()
    assert tokens(logits, mixed_rows(8)) == tokens(logits.float(), mixed_rows(8))


# --- log probabilities ---


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(4, 100)
    exact = torch.log_softmax(logits.double(), dim=-1)
    rows = [
        row(logprobs=3, temperature=0.5, logit_bias={7: 100.0}),
        row(),
        row(logprobs=0, temperature=1.0),
        row(logprobs=200),
    ]
    first, second, third, fourth = sample(logits, rows)
    assert first.token == 7
    assert first.logprobs is not None
    assert first.logprobs.token_id == 7
    assert first.logprobs.logprob == pytest.approx(float(exact[0, 7]), abs=1e-5)
    values, ids = exact[0].topk(3)
    assert [token for token, _ in first.logprobs.top] == ids.tolist()
    assert [figure for _, figure in first.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert second.logprobs is None
    assert third.logprobs is not None
    assert third.logprobs.top == ()
    assert third.logprobs.logprob == pytest.approx(float(exact[2, third.token or 0]), abs=1e-5)
    assert fourth.logprobs is not None
    assert len(fourth.logprobs.top) == 100  # all that there are


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs(top: int) -> None:
    logits = torch.randn(50, 300)
    following = list(range(50))
    exact = torch.log_softmax(logits.double(), dim=-1)
    figures = prompt_logprobs(logits, following, top)
    assert [one.token_id for one in figures] == following
    for number, one in enumerate(figures):
        assert one.logprob == pytest.approx(float(exact[number, number]), abs=1e-5)
        assert [token for token, _ in one.top] == exact[number].topk(top).indices.tolist()
    assert prompt_logprobs(logits[:0], [], 2) == []


# --- what is refused ---


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias names token 100; the model has tokens 0 to 99"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
        ({"allowed_token_ids": (5, 100)}, "allowed_token_ids names token 100"),
        ({"allowed_token_ids": ()}, "is empty"),
    ],
)
def test_tokens_that_the_model_does_not_have(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_sampling(Sampling(**asked), 100)
    check_sampling(Sampling(logit_bias={99: 1.0}, allowed_token_ids=(0,)), 100)


NUMBERS = [
    ("temperature", [0, 1e-9, 100], [-0.1, NAN, INF, 1e300]),
    ("top_p", [1e-9, 1], [0, -0.1, 1.1, NAN]),
    ("top_k", [None, -1, 0, 2**31 - 1], [-2, 2**31, 2**64 - 1]),
    ("min_p", [0, 1], [-0.1, 1.1, NAN]),
    ("presence_penalty", [-2, 2], [NAN, INF, -INF]),
    ("frequency_penalty", [-2, 2], [NAN, INF, -INF]),
    ("repetition_penalty", [0.01, 2], [0, -1, NAN, INF]),
    ("logprobs", [None, 0, 1000], [-1]),
    ("prompt_logprobs", [None, 0, 1000], [-1]),
]


@pytest.mark.parametrize(("param", "taken", "refused"), NUMBERS)
def test_numbers_that_cannot_be_sampled_with(param: str, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        check_sampling(Sampling(**{param: value}), 100)
    for value in refused:
        with pytest.raises(InvalidRequest, match=f"{param} is ") as caught:
            check_sampling(Sampling(**{param: value}), 100)
        assert caught.value.fields["param"] == param


def test_every_number_has_bounds_that_are_tested() -> None:
    """Of a seed every value is valid, and the sampler never sees the number of choices."""
    types = {each.name: each.type for each in msgspec.structs.fields(Sampling)}
    numbers = {name for name, kind in types.items() if kind in (int, float, int | None, float | None)}
    numbers -= {"seed", "num_choices"}
    assert {name for name, _, _ in _BOUNDS} == {name for name, _, _ in NUMBERS} == numbers
