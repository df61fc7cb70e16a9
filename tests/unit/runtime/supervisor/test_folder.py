"""A directory for each supervisor, with files that only their owner can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvolt.core.errors import ConfigError
from kvolt.runtime.supervisor.folder import own_folder, private_file, private_folder


def test_supervisors_keep_apart_and_a_free_folder_is_taken_again(tmp_path: Path) -> None:
    base = tmp_path / "state" / "logs"
    with own_folder(base) as first:
        with own_folder(base) as second, own_folder(base) as third:
            assert [first, second, third] == [base, base / "2", base / "3"]
        with own_folder(base) as again:
            assert again == base / "2"
    with own_folder(base) as first:
        assert first == base
    assert [path.stat().st_mode & 0o777 for path in (base.parent, base, base / "2")] == [0o700] * 3


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(ConfigError, match="cannot write"), own_folder(tmp_path / "logs"):
        pass


def test_private_file(tmp_path: Path) -> None:
    path = tmp_path / "kvolt.toml"
    path.write_text("of a supervisor that was killed")
    path.chmod(0o644)
    with private_file(path, "a = 1") as made:
        assert made.read_text() == "a = 1"
        assert made.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
    with pytest.raises(ConfigError, match="cannot write"), private_file(tmp_path / "no" / "a", ""):
        pass


def test_a_private_folder_replaces_that_of_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / ".lora-state"
    path.mkdir(0o755)
    (path / "worker-0.json").touch()
    with private_folder(path) as made:
        assert list(made.iterdir()) == []
        assert made.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"), private_folder(tmp_path / "file"):
        pass
