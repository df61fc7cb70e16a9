"""`kvolt cluster`: the files that it writes."""

from pathlib import Path

import pytest

from kvolt.cli.main import main


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_link_to_a_key_stays_a_link() -> None:
    key, link = Path("a.key"), Path("link.key")
    assert main(["cluster", "init", str(key)]) == 0
    before = key.read_bytes()
    link.symlink_to(key)
    assert main(["cluster", "rotate", str(link)]) == 0
    assert link.is_symlink()
    assert key.read_bytes() != before
    assert key.stat().st_mode & 0o777 == 0o600


def test_init_does_not_replace_a_file_that_appears_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    key = Path("a.key")
    assert main(["cluster", "init", str(key)]) == 0
    before = key.read_bytes()
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as seen before another command wrote it
    assert main(["cluster", "init", str(key)]) == 2
    assert key.read_bytes() == before
