"""The files: names, damage, removal under the feet of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvolt.core.errors import KeyConflict
from kvolt.runtime.discovery.directory import Directory, OwnedKey, file_name
from kvolt.runtime.discovery.port import LeaseId
from kvolt.runtime.discovery.view import Record

L1, L2 = LeaseId("aa01"), LeaseId("bb02")
WALL_S = 1_700_000_000.0
STAMP_NS = int(WALL_S * 1e9)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    made = Directory(tmp_path, "t")
    made.ensure(WALL_S)
    return made


def put(
    directory: Directory, key: str, lease: LeaseId, value: bytes | None = b"v", stamp: int = 0
) -> OwnedKey:
    return OwnedKey(value or b"", directory.write_record(Record(key, lease, value), STAMP_NS + stamp))


def test_names_are_safe_and_distinct() -> None:
    keys = ["", ".", "..", "a/b", "a%2Fb", "a.b", "k" * 999, "k" * 998, "é" * 300, "é" * 301, "a@b", "\0"]
    names = [file_name(key) for key in keys]
    assert len(set(names)) == len(keys)
    for name in names[1:]:
        assert name
        assert not name.startswith(".")
        assert "/" not in name
        assert len(name.encode()) <= 255


def test_unchanged_records_are_not_read_again(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        put(directory, f"k/{number}", L1)
    first = directory.scan(relist=False).records
    opened: list[Path] = []
    read_bytes = Path.read_bytes

    def spy(path: Path) -> bytes:
        opened.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", spy)
    assert directory.scan(relist=False).records is first
    assert directory.scan(relist=True).records is first
    assert opened == []
    put(directory, "k/3", L1, b"w", stamp=1)
    second = directory.scan(relist=False).records
    assert second["k/3"].value == b"w"
    assert [path.name for path in opened] == [file_name("k/3")]


def test_foreign_and_damaged_files_are_left_alone(
    directory: Directory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.write_lease(L1, 3.0, STAMP_NS)
    put(directory, "good", L1)
    content = (tmp_path / "keys" / "good").read_bytes()
    (tmp_path / "keys" / "half").write_bytes(content[: len(content) // 2])
    (tmp_path / "keys" / "empty").touch()
    (tmp_path / "keys" / "copy-of-good").write_bytes(content)
    (tmp_path / "keys" / "folder").mkdir()
    (tmp_path / "keys" / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "keys" / "pipe")
    os.truncate(tmp_path / "keys" / "empty", 100 * 1024 * 1024)
    (tmp_path / "leases" / "not json").write_text("{")
    (tmp_path / "leases" / "cc03").write_text('{"ttl_s": -1, "pid": 1}')
    (tmp_path / "leases" / "dd04").write_bytes(b'{"ttl_s": "\xff"}')
    for _ in range(3):
        snapshot = directory.scan(relist=True)
        assert list(snapshot.records) == ["good"]
        assert list(snapshot.leases) == [L1]
    assert len(caplog.messages) == 9
    assert len(set(caplog.messages)) == 9


def test_renew_puts_back_what_is_missing_and_gives_up_what_was_taken(
    directory: Directory, tmp_path: Path
) -> None:
    directory.write_lease(L1, 3.0, STAMP_NS)
    keys = {key: put(directory, key, L1) for key in ("stays", "lost", "broken", "taken")}
    (tmp_path / "keys" / "lost").unlink()
    (tmp_path / "keys" / "broken").write_bytes(b"?")
    put(directory, "taken", L2, b"theirs", stamp=1)
    (tmp_path / "leases" / L1).unlink()
    renewal = directory.renew(L1, 3.0, keys, STAMP_NS + 2, rewrite=False)
    assert sorted(renewal.keys) == ["broken", "lost"]
    assert renewal.lost == ["taken"]
    snapshot = directory.scan(relist=True)
    assert {key: record.value for key, record in snapshot.records.items()} == {
        "stays": b"v",
        "lost": b"v",
        "broken": b"v",
        "taken": b"theirs",
    }
    assert snapshot.leases[L1].mtime_ns == STAMP_NS + 2
    del keys["taken"]
    assert directory.renew(L1, 3.0, {**keys, **renewal.keys}, STAMP_NS + 3, rewrite=False).keys == {}


def test_rewrite_removes_what_a_late_write_left(directory: Directory) -> None:
    directory.write_lease(L1, 3.0, STAMP_NS)
    keys = {"wanted": put(directory, "wanted", L1)}
    put(directory, "ghost", L1)
    put(directory, "theirs", L2)
    put(directory, "tombstone", L1, None)
    directory.renew(L1, 3.0, keys, STAMP_NS + 1, rewrite=True)
    assert list(directory.scan(relist=True).records) == ["theirs", "tombstone", "wanted"]


def test_ending_a_lease_spares_a_key_taken_over(directory: Directory, tmp_path: Path) -> None:
    directory.write_lease(L1, 3.0, STAMP_NS)
    put(directory, "mine", L1)
    put(directory, "theirs", L2)
    directory.end_lease(L1, ["mine", "theirs", "never"])
    snapshot = directory.scan(relist=True)
    assert list(snapshot.records) == ["theirs"]
    assert snapshot.leases[L1].ended
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_key_replaced_during_its_removal_survives(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(directory, "a", L1)
    rename = os.rename

    def rename_too_late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        put(Directory(tmp_path, "other"), "a", L2, b"new", stamp=5)
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_too_late)
    directory.remove_key("a", L1)
    assert directory.scan(relist=True).records["a"] == Record("a", L2, b"new")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_dead_are_removed_unless_they_woke_up(directory: Directory, tmp_path: Path) -> None:
    for lease in (L1, L2):
        directory.write_lease(lease, 3.0, STAMP_NS)
        put(directory, f"of-{lease}", lease)
    directory.scan(relist=True)
    directory.renew(L2, 3.0, {}, STAMP_NS + 9, rewrite=False)
    second = Directory(tmp_path, "u")
    second.scan(relist=True)
    for remover in (directory, second):
        remover.remove_dead({L1: STAMP_NS, L2: STAMP_NS})
    snapshot = directory.scan(relist=True)
    assert list(snapshot.leases) == [L2]
    assert list(snapshot.records) == [f"of-{L2}"]


def test_leftovers_of_crashed_writers_go(directory: Directory, tmp_path: Path) -> None:
    for name, age_s in (("old", 3600.0), ("young", 1.0)):
        path = tmp_path / "tmp" / name
        path.touch()
        os.utime(path, (WALL_S - age_s, WALL_S - age_s))
    directory.ensure(WALL_S)
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["young"]


def test_a_key_of_another_live_lease_is_not_claimed(directory: Directory) -> None:
    directory.write_lease(L1, 5.0, 0)
    put(directory, "k", L1, b"theirs")
    with pytest.raises(KeyConflict):
        directory.claim(Record("k", L2, b"ours"), 1, lambda lease, seen: True)
    directory.claim(Record("k", L1, b"newer"), 1, lambda lease, seen: True)
    directory.claim(Record("k", L2, b"ours"), 2, lambda lease, seen: False)
    directory.end_lease(L2, [])
    directory.claim(Record("k", L1, b"after its end"), 3, lambda lease, seen: True)
    for odd in ("../leases", "a\0b", ""):
        put(directory, "k", LeaseId(odd))
        directory.claim(Record("k", L1, b"of no lease"), 4, lambda lease, seen: True)
