"""Counts that several processes share: by one table, within one bound."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvolt.core.errors import ConfigError, Overloaded
from kvolt.frontend.admission import Admission, LatestLoads
from kvolt.frontend.shared_count import SharedCounts, SharedSlot


@contextmanager
def admit(door: Admission) -> Iterator[None]:
    leave = door.acquire()
    try:
        yield
    finally:
        leave()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "counts"
    SharedCounts.create(path, 3).close()
    return path


def admission(path: Path, slot: int, max_requests: int = 4) -> Admission:
    return Admission(LatestLoads(), max_requests, SharedSlot(SharedCounts(path), slot))


def test_one_bound_over_all_slots(path: Path) -> None:
    first, second = admission(path, 0), admission(path, 2)
    with ExitStack() as running:
        for one in (first, first, first, second):
            running.enter_context(admit(one))
        for one in (first, second):
            with pytest.raises(Overloaded) as caught, admit(one):
                pass
            assert caught.value.fields["limit"] == 4
        assert (first.num_running, second.num_running) == (3, 1)  # a refusal leaves no trace
    with ExitStack() as running:
        for _ in range(4):
            running.enter_context(admit(second))
    assert SharedCounts(path).total() == 0


def test_a_request_that_fails_gives_its_place_back(path: Path) -> None:
    one = admission(path, 0)
    with pytest.raises(ZeroDivisionError), admit(one):
        raise ZeroDivisionError
    assert SharedCounts(path).total() == 0


def test_a_restarted_process_begins_at_zero(path: Path) -> None:
    counts = SharedCounts(path)
    counts.set_count(0, 7)
    counts.set_count(1, 2)
    assert SharedSlot(counts, 1).set_count(1) == 8
    assert admission(path, 0).num_running == 0
    assert counts.total() == 1


def test_another_process_sees_it(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from kvolt.frontend.shared_count import *\n"
        "print(SharedSlot(SharedCounts(Path(sys.argv[1])), 1).set_count(5))"
    )
    SharedSlot(SharedCounts(path), 0).set_count(2**40)
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.stdout == f"{2**40 + 5}\n", done.stderr
    assert SharedCounts(path).total() == 2**40 + 5


def test_the_file_is_ours_alone_and_new(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    path.write_bytes(b"left by somebody")
    counts = SharedCounts.create(path, 256)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert (counts.num_slots, counts.total()) == (256, 0)
    counts.close()


@pytest.mark.parametrize("content", [None, b"", b"1234567"])
def test_what_is_no_table_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "counts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot share counts") as caught:
        SharedCounts(path)
    assert caught.value.fields["remedy"]


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_that_is_not_there(path: Path, slot: int) -> None:
    with pytest.raises(ConfigError, match="is out of range"):
        SharedSlot(SharedCounts(path), slot)
