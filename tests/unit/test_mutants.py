"""The list of known defects is up to date, and the tool that runs them tells killed from survived."""

from __future__ import annotations

import ast

import pytest
from tests.mutants import __main__ as mutants
from tests.mutants.mutations import MUTATIONS, Mutation

FEWEST = 20


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_mutation_applies_to_the_source(mutation: Mutation) -> None:
    mutated = mutants.apply(mutation, mutants.PACKAGE)
    assert mutated != (mutants.PACKAGE / mutation.path).read_text()
    ast.parse(mutated)


def test_there_are_enough_mutations_and_names_are_unique() -> None:
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS) >= FEWEST


def test_a_defect_is_killed_by_a_seed() -> None:
    swapped = next(each for each in MUTATIONS if each.name == "swapped KV blocks")
    verdict = mutants.judge(swapped, num_seeds=1)
    assert verdict.is_killed
    assert "has wrong KV" in verdict.what


def test_a_change_without_effect_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = Mutation(
        name="comment", path="kv/pool.py", old='"""BlockPool', new='"""  BlockPool', why="none"
    )
    monkeypatch.setattr(
        mutants, "_run_seeds", lambda folder, first, count: mutants.Verdict(False, "survived")
    )
    assert not mutants.judge(harmless, num_seeds=1).is_killed


def test_a_mutation_that_does_not_apply_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = Mutation(name="stale", path="kv/pool.py", old="text of long ago", new="", why="none")
    monkeypatch.setattr(mutants, "MUTATIONS", (stale,))
    assert mutants.main([]) == 1
    assert "does not apply" in capsys.readouterr().out
