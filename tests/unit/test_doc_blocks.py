"""Every command and snippet of README and docs names what exists; the run is in tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doc_blocks import Block, blocks, check, check_inline, inline_commands, missing_output


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.place)
def test_names_of_a_block_exist(block: Block, tmp_path: Path) -> None:
    check(block, tmp_path)
    if block.reason:
        pytest.skip(f"checked, not run: {block.reason}")


@pytest.mark.parametrize(("page", "command"), sorted(set(inline_commands())))
def test_verbs_and_flags_in_text_exist(page: str, command: str) -> None:
    check_inline(command)


def test_shown_output_may_differ_in_numbers_only() -> None:
    actual = "process  state\nworker-0  ready in 12.5 ms  b66e61ad371d1b33\n"
    assert not missing_output(("worker-0 ready in 1.2 s 0000000000000000", "pro...  state"), actual)
    assert missing_output(("worker-0 broken in 1.2 s 0000000000000000",), actual)
