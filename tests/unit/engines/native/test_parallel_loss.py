"""Tensor parallelism: a rank that dies. Apart, as a process has one group of ranks at a time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from tests.unit.engines.native.equality_lab import Drive, Reference, ask, core_of
from tests.unit.engines.native.test_parallel import MAX_TOKENS, PROMPT, SMALL, assert_equal

from kvolt.testing.tiny_models import tiny_checkpoint


def test_a_rank_that_dies_ends_the_step_and_the_next_start_works(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", seed=3)
    reference = Reference.of_folder(folder)
    before = {process.pid for process in multiprocessing.active_children()}
    for is_killed in (True, False):
        core = core_of(folder, **SMALL)
        try:
            (rank,) = [process for process in multiprocessing.active_children() if process.pid not in before]
            drive = Drive(core, [ask("p6", PROMPT, MAX_TOKENS)])
            drive.step()
            if is_killed:
                rank.kill()
                rank.join()
                with pytest.raises(Exception, match=r"rank-1|peer|Connection"):
                    drive.step()
                core.scheduler.check_integrity()
            else:
                assert_equal(reference, drive.finish())
        finally:
            core.close()
        assert not rank.is_alive()
