"""`kvolt key`: create, list, revoke and rotate API keys."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.table import Table

from kvolt.cli.flags import option, switch
from kvolt.cli.frontend.access import key_store
from kvolt.cli.status import console
from kvolt.core.errors import ConfigError
from kvolt.frontend.tenants.key_file import FileKeyStore
from kvolt.frontend.tenants.records import (
    ApiKey,
    KeyRecords,
    Scope,
    Tenant,
    new_key_id,
    new_secret,
    secret_hash,
)
from kvolt.frontend.tenants.store import KeyStore, unknown_key
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.loader import LoadedConfig

HELP = """
Create and manage API keys of the HTTP API (docs/api-keys.md). Running frontends apply changes within two seconds.

Examples:
  kvolt key create --tenant acme                  print a new key, once; write its hash to ./api-keys.jsonl
  kvolt key create --tenant acme --requests-per-second 5 --concurrency 8 --expires 30d
  kvolt key list                                  keys and limits of tenants
  kvolt key rotate 3f2a9c1b7d04                   a new key; the old one stays valid for a day
  kvolt key revoke 3f2a9c1b7d04
  kvolt frontend --api-keys api-keys.jsonl        require the keys
"""

_DEFAULT = "api-keys.jsonl"
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")

T = TypeVar("T")


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = _action(actions, "create", "print a new key of a tenant; set the tenant's limits")
    option(create, "--tenant", "NAME", "Tenant of the key; created if it is new. Required.")
    _add_limits(create)
    option(
        create, "--expires", "TIME", "Lifetime of the key, such as 12h or 30d. Default: unlimited.", _duration
    )
    switch(create, "--admin", "The key also allows metrics and controls from other machines (scope admin).")
    _action(actions, "list", "list keys and tenants")
    revoke = _action(actions, "revoke", "remove a key; answers in progress continue")
    revoke.add_argument("id", metavar="ID", help="Id of the key (`kvolt key list`).")
    rotate = _action(actions, "rotate", "print a new key with the same rights as an old one, which expires")
    rotate.add_argument("id", metavar="ID", help="Id of the old key.")
    option(
        rotate,
        "--grace",
        "TIME",
        "Time for which the old key stays valid. [default: 24h]",
        _duration,
        default=None,
    )


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
    option(action, "--api-keys", "FILE", f"Key file. Default: frontend.api_keys, else {_DEFAULT}.")
    return action


def _add_limits(create: argparse.ArgumentParser) -> None:
    group = create.add_argument_group("limits of the tenant (of all its keys together); those not given stay")
    option(group, "--requests-per-second", "N", "Default: unlimited.", float)
    option(group, "--input-tokens-per-minute", "N", "Prompt tokens. Default: unlimited.", int)
    option(group, "--output-tokens-per-minute", "N", "Generated tokens. Default: unlimited.", int)
    option(group, "--concurrency", "N", "Requests in progress at the same time. Default: unlimited.", int)
    option(group, "--models", "A,B", "Names of models and adapters. Default: all.", _names)
    option(
        group, "--max-priority", "N", "Higher priorities of requests are reduced. Default: unlimited.", int
    )
    option(
        group,
        "--share",
        "N",
        "Share of the router's queue while requests wait, relative to other tenants; 0.1 to 100. Default: 1.",
        float,
    )
    option(
        group,
        "--cache-salt",
        "TEXT",
        "KV namespace; tenants with the same one share prefixes. Default: the name.",
    )


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    frontend = loaded.settings.frontend
    if args.api_keys is not None:
        path: Path | None = Path(args.api_keys)
    else:
        path = Path(_DEFAULT) if frontend.api_keys is None and frontend.key_store is None else None
    store = FileKeyStore(path) if path is not None else key_store(frontend)
    assert store is not None
    creates_file = path is not None and args.action == "create" and not path.exists()
    records = None if creates_file else store.read(None)
    _ACTIONS[args.action](args, store, records or KeyRecords(""))
    store.close()
    return 0


def _create(args: argparse.Namespace, store: KeyStore, records: KeyRecords) -> None:
    if not args.tenant:
        raise ConfigError("key create: no tenant", key="flags", remedy="add --tenant NAME")
    known = next((each for each in records.tenants if each.name == args.tenant), None)
    tenant = known or _checked(Tenant, {"name": args.tenant})
    names = [name for name in Tenant.__struct_fields__ if name != "name"]
    changes = {name: value for name in names if (value := getattr(args, name)) is not None}
    changed = _checked(Tenant, {**msgspec.structs.asdict(tenant), **changes})
    now = int(SystemClock().wall())
    secret = new_secret()
    key = ApiKey(
        id=new_key_id(),
        tenant=changed.name,
        sha256=secret_hash(secret),
        created=now,
        expires=None if args.expires is None else now + args.expires,
        scopes=(Scope.INFERENCE, Scope.ADMIN) if args.admin else (Scope.INFERENCE,),
    )
    if changed != known:
        store.put_tenant(changed)
    store.put_key(key)
    _print_secret(key, secret)


def _list(args: argparse.Namespace, store: KeyStore, records: KeyRecords) -> None:
    now = SystemClock().wall()
    keys = Table("key", "tenant", "scopes", "created", "expires", box=None)
    for key in records.keys:
        expires = (
            "" if key.expires is None else _date(key.expires) + (" (expired)" if key.expires <= now else "")
        )
        keys.add_row(key.id, key.tenant, ",".join(key.scopes), _date(key.created), expires)
    tenants = Table(
        "tenant", "requests/s", "input/min", "output/min", "concurrency", "share", "models", box=None
    )
    for tenant in records.tenants:
        limits = (
            tenant.requests_per_second,
            tenant.input_tokens_per_minute,
            tenant.output_tokens_per_minute,
            tenant.concurrency,
        )
        shown = ("" if limit is None else f"{limit:.12g}" for limit in limits)
        tenants.add_row(tenant.name, *shown, f"{tenant.share:g}", ",".join(tenant.models))
    console().print(keys, "", tenants, markup=False)


def _revoke(args: argparse.Namespace, store: KeyStore, records: KeyRecords) -> None:
    store.remove_key(args.id)
    print(f"revoked {args.id}")


def _rotate(args: argparse.Namespace, store: KeyStore, records: KeyRecords) -> None:
    old = next((each for each in records.keys if each.id == args.id), None)
    if old is None:
        raise unknown_key(args.id)
    now = int(SystemClock().wall())
    secret = new_secret()
    lifetime = None if old.expires is None else now + old.expires - old.created
    key = msgspec.structs.replace(
        old, id=new_key_id(), sha256=secret_hash(secret), created=now, expires=lifetime
    )
    end = now + (_UNITS_S["d"] if args.grace is None else args.grace)
    end = end if old.expires is None else min(end, old.expires)
    store.put_key(key)  # first: an error must not leave the tenant without a key
    store.put_key(msgspec.structs.replace(old, expires=end))
    _print_secret(key, secret)
    print(f"{old.id} expires {_date(end)}")


_ACTIONS: dict[str, Callable[[argparse.Namespace, KeyStore, KeyRecords], None]] = {
    "create": _create,
    "list": _list,
    "revoke": _revoke,
    "rotate": _rotate,
}


def _print_secret(key: ApiKey, secret: str) -> None:
    print(f"key {key.id} of tenant {key.tenant}; it is shown only now:")
    print(secret)


def _date(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _checked(kind: type[T], values: dict[str, Any]) -> T:
    """Build a record; raises ConfigError for an invalid value."""
    try:
        return msgspec.convert({"type": "tenant", **values}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"key create: {error}", key="flags", remedy="see `kvolt key create --help`"
        ) from error


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _duration(text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 15m, 12h or 30d")
    return int(match[1]) * _UNITS_S[match[2]]
