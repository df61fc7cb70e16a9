"""Blocks that are about to be held: as long as a prompt that has them is under way there, and no longer."""

from __future__ import annotations

import numpy as np

from kvolt.router.expected import ExpectedBlocks

ROWS = np.array([4, 7], dtype=np.intp)


def test_what_was_sent_is_expected_until_it_ends() -> None:
    expected = ExpectedBlocks()
    assert expected.find((1, 2), ROWS).tolist() == [0, 0]
    expected.send(7, 1, (1, 2, 3))
    assert expected.find((1, 2, 9), ROWS).tolist() == [0, 2]
    expected.end(7, 1)
    assert expected.find((1, 2, 9), ROWS).tolist() == [0, 0]
    assert expected.num_prompts == 0


def test_what_another_prompt_has_stays() -> None:
    expected = ExpectedBlocks()
    expected.send(4, 1, (1, 2, 3))
    expected.send(4, 2, (1, 2, 8))
    expected.end(4, 1)
    assert expected.find((1, 2, 3), ROWS).tolist() == [2, 0]
    expected.end(4, 1)
    expected.end(4, 9)
    expected.end(5, 1)
    expected.end(4, 2)
    assert expected.find((1,), ROWS).tolist() == [0, 0]


def test_a_worker_that_is_gone_takes_all_along() -> None:
    expected = ExpectedBlocks()
    expected.send(4, 1, (1, 2))
    expected.drop_row(4)
    expected.drop_row(7)
    expected.end(4, 1)
    expected.send(7, 2, (5,))
    assert expected.find((1, 2), ROWS).tolist() == [0, 0]
    assert expected.find((5,), ROWS).tolist() == [0, 1]


def test_a_prompt_without_blocks_expects_nothing() -> None:
    expected = ExpectedBlocks()
    expected.send(4, 1, ())
    assert expected.num_prompts == 0
