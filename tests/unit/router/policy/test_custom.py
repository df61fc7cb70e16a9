"""Custom policies: tested first, reloaded on change, never a reason to fail a request."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kvolt.core.errors import ConfigError
from kvolt.router.policy.cost_model import Floats
from kvolt.router.policy.custom import CustomPolicy, is_custom, read_policy_source
from kvolt.router.policy.policy import RequestView, WorkersView

ASKED = RequestView(prompt_tokens=640, block_size=64, output_tokens=128)

GOOD = """
def cost(request, workers):
    return workers.queue_s + workers.prefill_s
"""


def workers(number: int = 3, **given: list[float]) -> WorkersView:
    names = WorkersView.__struct_fields__
    return WorkersView(**{name: np.array(given.get(name, [0.0] * number)) for name in names})


def fallback(request: RequestView, seen: WorkersView) -> Floats:
    return np.full(len(seen.requests), 77.0)


class Policy:
    """A file that a test writes."""

    def __init__(self, folder: Path, text: str = GOOD) -> None:
        self.path = folder / "mine.py"
        self.num_written = 0
        self.write(text)
        self.loaded = CustomPolicy(f"{self.path}:cost", fallback)

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.num_written += 1
        stamp = (
            1_000_000_000 * self.num_written
        )  # saves may follow each other faster than a file system counts
        os.utime(self.path, ns=(stamp, stamp))

    def costs(self, **given: list[float]) -> list[float]:
        told: list[float] = self.loaded(ASKED, workers(**given)).tolist()
        return told


def test_it_decides(tmp_path: Path) -> None:
    mine = Policy(tmp_path)
    assert mine.costs(queue_s=[1.0, 2.0, 3.0], prefill_s=[0.5, 0.5, 0.0]) == [1.5, 2.5, 3.0]
    assert not mine.loaded.failures


def test_a_module_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "somebody"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "weights.py").write_text("WEIGHT = 2.0")
    (package / "routing.py").write_text(
        "from .weights import WEIGHT\ndef cost(request, workers):\n    return WEIGHT * workers.queue_s\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = CustomPolicy("somebody.routing:cost", fallback)
    assert policy(ASKED, workers(queue_s=[1.0, 2.0, 0.0])).tolist() == [2.0, 4.0, 0.0]
    assert read_policy_source("somebody.routing:cost").startswith(b"from .weights")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def cost(request, workers: return 1", "SyntaxError"),
        ("import nothing_like_this", "No module named"),
        ("def other(request, workers):\n    return workers.queue_s", "has no function cost"),
        ("cost = 5", "has no function cost"),
        ("def cost(request):\n    return 1", "TypeError"),
        ("def cost(request, workers):\n    return 1.0", r"the shape \(\)"),
        ("def cost(request, workers):\n    return [1.0]", r"test with 3 workers .* the shape \(1,\)"),
        ("def cost(request, workers):\n    return workers.queue_s / 0 * 0", "finite|RuntimeWarning"),
        ("def cost(request, workers):\n    return ['a'] * len(workers.queue_s)", "not numbers"),
        ("def cost(request, workers):\n    workers.queue_s[0] = 5\n    return workers.queue_s", "read-only"),
    ],
)
def test_what_does_not_work_is_refused_at_the_start(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Policy(tmp_path, text)
    assert "FILE.py:FUNCTION" in str(caught.value.fields["remedy"])


@pytest.mark.parametrize(
    "name",
    ["nowhere.py:cost", "no.such.module:cost", "sys:cost", ":cost", "mine.py:", "mine.py:a b", "a..b:cost"],
)
def test_a_missing_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be used"):
        CustomPolicy(name, fallback)


def test_only_a_function_has_a_colon() -> None:
    assert is_custom("mine.py:cost")
    assert not is_custom("latency")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise ValueError('no')", "raised"),
        ("return workers.queue_s * float('nan')", "malformed"),
        ("return workers.queue_s[1:]", "malformed"),
        ("return None", "malformed"),
        ("workers.blocks[0] = 1", "raised"),
    ],
)
def test_a_request_that_it_fails_on_is_decided_by_another_and_counted(
    tmp_path: Path, fault: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Policy(
        tmp_path,
        "def cost(request, workers):\n"
        f"    if workers.queue_s[0] == 9.0:\n        {fault}\n    return workers.queue_s\n",
    )
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert mine.costs(queue_s=[9.0, 1.0, 2.0]) == [77.0] * 3
    assert mine.loaded.failures == {reason: 3}
    assert len(caplog.records) == 1, "it is said once"
    assert mine.costs(queue_s=[8.0, 1.0, 2.0]) == [8.0, 1.0, 2.0]
    assert mine.loaded.costs(ASKED, workers(queue_s=[9.0, 0.0, 0.0])) is None


def test_an_edit_is_loaded(tmp_path: Path) -> None:
    mine = Policy(tmp_path)
    assert not mine.loaded.reload_if_changed()
    mine.write("def cost(request, workers):\n    return -workers.queue_s\n")
    assert mine.costs(queue_s=[1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert mine.loaded.reload_if_changed()
    assert mine.costs(queue_s=[1.0, 2.0, 3.0]) == [-1.0, -2.0, -3.0]
    assert (mine.loaded.num_reloads, mine.loaded.num_failed_reloads) == (1, 0)


def test_a_broken_edit_keeps_the_old_version_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Policy(tmp_path)
    mine.write("def cost(")
    with caplog.at_level(logging.ERROR):
        assert not mine.loaded.reload_if_changed()
        assert not mine.loaded.reload_if_changed()
    assert len(caplog.records) == 1
    assert "SyntaxError" in caplog.text
    assert mine.costs(queue_s=[1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert (mine.loaded.num_reloads, mine.loaded.num_failed_reloads) == (0, 1)
    mine.write(GOOD)
    assert mine.loaded.reload_if_changed()


def test_a_briefly_missing_file_changes_nothing(tmp_path: Path) -> None:
    mine = Policy(tmp_path)
    mine.path.unlink()
    assert not mine.loaded.reload_if_changed()
    assert mine.costs(queue_s=[1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    mine.write(GOOD + "\n")
    assert mine.loaded.reload_if_changed()


def test_a_file_may_have_dataclasses(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Weights:\n    queue: float = 3.0\n"
        "def cost(request, workers):\n    return Weights().queue * workers.queue_s\n"
    )
    assert Policy(tmp_path, text).costs(queue_s=[1.0, 0.0, 0.0]) == [3.0, 0.0, 0.0]


def test_text_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_policy_source(str(tmp_path / "gone.py") + ":cost")


def test_a_custom_policy_gets_the_same_views(tmp_path: Path) -> None:
    text = "SEEN = []\ndef cost(request, workers):\n    SEEN.append(request)\n    return workers.blocks\n"
    Policy(tmp_path, text).costs()
    assert vars(sys.modules["kvolt_policy_mine"])["SEEN"][-1] == ASKED


def test_a_file_that_cannot_be_run_leaves_no_module(tmp_path: Path) -> None:
    path = tmp_path / "never_run.py"
    path.write_text("raise OSError('no')")
    with pytest.raises(ConfigError):
        CustomPolicy(f"{path}:cost", fallback)
    assert "kvolt_policy_never_run" not in sys.modules
