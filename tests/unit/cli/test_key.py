"""`kvolt key` and `kvolt usage`."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvolt.api.cluster import ProcessView
from kvolt.cli.main import main
from kvolt.cli.usage import total_usage
from kvolt.frontend.tenants.key_file import FileKeyStore
from kvolt.frontend.tenants.records import KeyTable, Scope, Tenant
from kvolt.frontend.tenants.usage import TenantUsage
from kvolt.runtime.process_control import ProcessStatus


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(file: str = "api-keys.jsonl") -> KeyTable:
    records = FileKeyStore(Path(file)).read(None)
    assert records is not None
    return KeyTable(records)


def secret_of(capsys: pytest.CaptureFixture[str]) -> str:
    out = capsys.readouterr().out
    (secret,) = re.findall(r"^kvolt-sk-\S+$", out, re.MULTILINE)
    return str(secret)


def test_create_prints_the_key_once(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "key",
        "create",
        "--tenant",
        "acme",
        "--requests-per-second",
        "2.5",
        "--models",
        "a, b",
        "--expires",
        "2d",
    ]
    assert main(argv) == 0
    secret = secret_of(capsys)
    caller = table().find(secret)
    assert caller is not None
    assert caller.tenant == Tenant(name="acme", requests_per_second=2.5, models=("a", "b"))
    assert caller.key.expires == caller.key.created + 2 * 86_400
    assert caller.key.scopes == (Scope.INFERENCE,)
    assert main(["key", "list"]) == 0
    listed = capsys.readouterr().out
    assert caller.key.id in listed
    assert secret not in listed


def test_a_second_key_keeps_the_limits_that_are_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "create", "--tenant", "acme", "--concurrency", "3", "--cache-salt", "s"]) == 0
    first = secret_of(capsys)
    assert main(["key", "create", "--tenant", "acme", "--admin", "--max-priority", "0"]) == 0
    second = secret_of(capsys)
    keys = table()
    callers = [keys.find(first), keys.find(second)]
    assert [each.tenant for each in callers if each] == [
        Tenant(name="acme", concurrency=3, max_priority=0, cache_salt="s")
    ] * 2
    assert callers[1] is not None
    assert callers[1].key.scopes == (Scope.INFERENCE, Scope.ADMIN)


def test_revoke_and_rotate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "create", "--tenant", "acme", "--api-keys", "other.jsonl"]) == 0
    first = secret_of(capsys)
    caller = table("other.jsonl").find(first)
    assert caller is not None
    assert main(["key", "rotate", caller.key.id, "--grace", "90s", "--api-keys", "other.jsonl"]) == 0
    second = secret_of(capsys)
    old, new = (table("other.jsonl").find(secret) for secret in (first, second))
    assert old is not None
    assert new is not None
    assert new.key.expires is None
    assert old.key.expires == new.key.created + 90
    assert main(["key", "revoke", old.key.id, "--api-keys", "other.jsonl"]) == 0
    assert table("other.jsonl").find(first) is None
    assert table("other.jsonl").find(second) is not None


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["create"], "--tenant"),
        (["create", "--tenant", "a b"], "name"),
        (["create", "--tenant", "a", "--concurrency", "0"], "concurrency"),
        (["create", "--tenant", "a", "--requests-per-second", "nan"], "requests_per_second"),
        (["create", "--tenant", "a", "--expires", "soon"], "30d"),
        (["create", "--tenant", "a", "--cache-salt", "a b"], "cache_salt"),
        (["create", "--tenant", "a", "--share", "0"], "share"),
        (["create", "--tenant", "a", "--share", "nan"], "share"),
        (["list"], "kvolt key create"),
    ],
)
def test_invalid_commands_write_nothing(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["key", *argv]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "api-keys.jsonl").exists()


def test_unknown_ids_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "create", "--tenant", "acme"]) == 0
    for action in ("revoke", "rotate"):
        assert main(["key", action, "none"]) == 1
        assert "no key 'none'" in capsys.readouterr().err


def test_usage_is_summed_over_frontends() -> None:
    def view(name: str, details: dict[str, object]) -> ProcessView:
        packed = msgspec.msgpack.decode(msgspec.msgpack.encode(details))
        status = ProcessStatus(
            name=name, address="h:1", uptime_s=1, connections=0, calls_open=0, endpoints=(), details=packed
        )
        return ProcessView(name, "h:1", None, status)

    first = {"acme": TenantUsage(1, 0, 10, 20, {"requests": 2})}
    second = {"acme": TenantUsage(2, 1, 1, 1, {"requests": 1, "model": 1}), "beta": TenantUsage(1)}
    views = [
        view("a", {"tenant_usage": first}),
        view("b", {"tenant_usage": second}),
        view("c", {"tenant_usage": "of another version"}),
        view("worker", {}),
        ProcessView("lost", "h:2", None, None, "gone"),
    ]
    assert total_usage(views) == {
        "acme": TenantUsage(3, 1, 11, 21, {"requests": 3, "model": 1}),
        "beta": TenantUsage(1),
    }
