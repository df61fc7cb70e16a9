from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.engines.native.sampling import processors
from kvolt.engines.native.sampling.processors import BanRepeatedNgrams, make_processors, processor_names


def banned(processor: BanRepeatedNgrams, prompt: Sequence[int], output: Sequence[int]) -> set[int]:
    logits = torch.zeros(10)
    processor(logits, prompt, output)
    return set(torch.isinf(logits).nonzero().flatten().tolist())


def naive(n: int, tokens: list[int]) -> set[int]:
    last = tokens[len(tokens) - n + 1 :]
    grams = (tokens[at : at + n] for at in range(len(tokens) - n + 1))
    return {gram[-1] for gram in grams if gram[:-1] == last} if len(tokens) >= n else set()


def test_repeated_ngrams_are_banned_across_prompt_and_output() -> None:
    assert banned(BanRepeatedNgrams(3), [1, 2, 3, 4], [1, 2]) == {3}
    assert banned(BanRepeatedNgrams(2), [5, 6, 5, 7], [5]) == {6, 7}
    assert banned(BanRepeatedNgrams(1), [1], [2]) == {1, 2}
    assert banned(BanRepeatedNgrams(3), [1], [2]) == set()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_counting_on_equals_counting_anew(n: int) -> None:
    tokens = [1, 2, 1, 2, 3, 1, 2, 1, 1, 1, 1, 2, 3, 1, 2]
    prompt, output = tokens[:4], tokens[4:]
    kept = BanRepeatedNgrams(n)
    for length in range(len(output) + 1):
        assert banned(kept, prompt, output[:length]) == naive(n, [*prompt, *output[:length]]), length
    assert banned(kept, prompt, output[:2]) == naive(n, [*prompt, *output[:2]])  # an output that shrank


def test_tokens_outside_the_logits_are_passed_over() -> None:
    assert banned(BanRepeatedNgrams(1), [3, 10, 99], []) == {3}


def test_names_and_arguments() -> None:
    assert make_processors({}) == ()
    assert "ban_repeated_ngrams" in processor_names()
    first, second = make_processors(
        {"logits_processors": [{"name": "ban_repeated_ngrams", "args": {"n": n}} for n in (2, 3)]}
    )
    assert first is not second
    assert banned(first, [1, 2, 1], []) == {2}  # type: ignore[arg-type]
    assert banned(second, [1, 2, 1], []) == set()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("ban_repeated_ngrams", "must be a list"),
        (["missing"], "unknown logits processor 'missing'; known: ban_repeated_ngrams"),
        (["ban_repeated_ngrams"], "missing 1 required"),
        ([{"name": "ban_repeated_ngrams", "args": {"n": 0}}], "n must be a whole number"),
        ([{"name": "ban_repeated_ngrams", "args": {"n": 2, "m": 3}}], "unexpected keyword"),
        ([{"name": "ban_repeated_ngrams", "args": [2]}], "must be a name or"),
        ([{"name": 3}], "must be a name or"),
        ([7], "must be a name or"),
        ([{"name": "ban_repeated_ngrams", "arg": {}}], "must be a name or"),
        (["x"] * 17, "at most 16"),
    ],
)
def test_what_is_wrong_is_said(asked: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        make_processors({"logits_processors": asked})
    assert caught.value.fields["param"] == "logits_processors"


@pytest.mark.parametrize("error", [RuntimeError("no luck"), KeyError("no luck"), OSError("no luck")])
def test_whatever_a_factory_raises_is_the_request_s_fault(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setitem(processors._BUILT_IN, "broken", broken)
    with pytest.raises(
        InvalidRequest, match=f"'broken' cannot be created: {type(error).__name__}: .*no luck"
    ):
        make_processors({"logits_processors": ["broken"]})


class Shout:
    def __call__(self, logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        logits[0] = 1


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("shout", f"{__name__}:Shout", processors.GROUP),
        EntryPoint("gone", "no.such.module:thing", processors.GROUP),
        EntryPoint("data", "math:pi", processors.GROUP),
        EntryPoint("bad", "broken:thing", processors.GROUP),
    ]

    def some(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "kvolt.logits_processors"
        return [point for point in points if name in (None, point.name)]

    monkeypatch.setattr(processors, "entry_points", some)
    monkeypatch.setattr(EntryPoint, "load", _load)
    (made,) = make_processors({"logits_processors": ["shout"]})
    assert isinstance(made, Shout)
    assert processor_names() == ["bad", "ban_repeated_ngrams", "data", "gone", "shout"]
    for name, message in (
        ("gone", "cannot be loaded"),
        ("bad", "cannot be loaded: not today"),
        ("data", "is not callable"),
    ):
        with pytest.raises(Unsupported, match=message):
            make_processors({"logits_processors": [name]})


_usual_load = EntryPoint.load


def _load(point: EntryPoint) -> object:
    if point.name == "bad":
        raise RuntimeError("not today")
    return Shout if point.name == "shout" else _usual_load(point)
