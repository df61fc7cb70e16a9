"""`kvolt cluster`: create, show and rotate a cluster key, issue certificates, and create join tokens."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

from kvolt.bench.load.sla import parse_duration_s
from kvolt.cli.flags import option, optional
from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.security.join_token import MAX_TTL_S, create_token

HELP = """
Create a cluster key. Processes that have it authenticate each other and encrypt their connections (docs/security.md).

Examples:
  kvolt cluster init                              write ./kvolt.key, readable by you only
  kvolt cluster show kvolt.key                    fingerprint, to compare the files of two machines
  kvolt cluster rotate kvolt.key                  replace the key in the file; running processes accept old and new
  kvolt cluster issue --role worker --name gpu-7  a certificate for a machine that must not have the key
  kvolt serve --cluster-key kvolt.key
  kvolt cluster token --role worker kvolt.key     a line that starts one worker on a machine without the key:
  KVOLT_CLUSTER_JOIN_TOKEN=kvolt-join-... kvolt worker MODEL --join HOST:PORT
"""

_DEFAULT = "kvolt.key"
_MAX_DAYS = 3650
_SETTINGS = {
    "certificate": "certificate.pem",
    "private_key": "private_key.pem",
    "authority": "authority.pem",
}
"""Settings of the section `cluster`, with the file of each."""
_TOKEN_ROLES = (ProcessRole.WORKER, ProcessRole.POOL, ProcessRole.FRONTEND, ProcessRole.ROUTER)


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (
        ("init", "create a key file"),
        ("show", "print the fingerprint and expiry of a key file"),
        ("rotate", "replace the key in a file; copy it to all machines afterwards, in any order"),
        ("issue", "write a certificate for one role, for a machine that must not have the key"),
    ):
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        optional(action, "file", "FILE", f"Key file. Default: {_DEFAULT}.")
        if name == "issue":
            roles = [role.value for role in ProcessRole]
            option(
                action,
                "--role",
                "ROLE",
                f"What it may do: {', '.join(roles)}.",
                choices=roles,
                default="worker",
            )
            option(action, "--name", "NAME", "Name of the machine or process.", default="node")
            option(action, "--days", "N", "Days until it expires.", int, default=30)
            option(action, "--out", "DIR", "Directory of the files. Default: the name.")
    text = "print a join token, with which one process without the key gets a certificate"
    token = actions.add_parser("token", help=text, description=text.capitalize() + ".")
    option(
        token,
        "--role",
        "ROLE",
        "What the process may be.",
        ProcessRole,
        default="worker",
        choices=_TOKEN_ROLES,
    )
    option(
        token,
        "--ttl",
        "TIME",
        "How long the token can be used, at most 7 days.",
        parse_duration_s,
        default="1h",
    )
    optional(token, "file", "FILE", f"Key file. Default: {_DEFAULT}.")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    path = Path(args.file or loaded.settings.cluster.key or _DEFAULT)
    now = SystemClock().wall()
    if args.action == "init":
        authority = ClusterAuthority.create(now)
        _write(path, authority, exclusive=True)
        print(f"created {path} (fingerprint {authority.fingerprint})")
        print("Copy it to all machines of the cluster over a secure channel, and start all processes with")
        print(f"  --cluster-key {path}")
    elif args.action == "rotate":
        authority = ClusterAuthority.load(path).rotate(now)
        _write(path, authority, exclusive=False)
        print(f"rotated {path} (fingerprint {authority.fingerprint})")
        print(
            "Copy it to all machines: processes read it within seconds, and accept the previous key until then."
        )
        print("Rotate again when all machines have it, to end what the previous key allows.")
    elif args.action == "issue":
        _issue(ClusterAuthority.load(path), args, now)
    elif args.action == "token":
        print(_token(path, args.role, args.ttl, now))
    else:
        authority = ClusterAuthority.load(path)
        expiry = datetime.fromtimestamp(authority.expires_at, UTC)
        print(f"{path}: fingerprint {authority.fingerprint}, expires {expiry:%Y-%m-%d}")
    return 0


def _token(path: Path, role: ProcessRole, ttl_s: float, now: float) -> str:
    if not 1 <= ttl_s <= MAX_TTL_S:
        raise ConfigError(
            f"--ttl is {ttl_s:g} s, must be 1 s to 7 days", key="ttl", remedy="for example 10m, 1h or 168h"
        )
    return create_token(ClusterAuthority.load(path), role, now, ttl_s).text


def _issue(authority: ClusterAuthority, args: argparse.Namespace, now: float) -> None:
    if not 1 <= args.days <= _MAX_DAYS:
        raise ConfigError(f"--days {args.days} is out of range", key="days", remedy=f"use 1 to {_MAX_DAYS}")
    identity = Identity.of(ProcessRole(args.role), args.name)
    issued = authority.issue(identity, now, args.days * 86_400.0)
    folder = Path(args.out or identity.process)
    files = {
        "certificate.pem": issued.chain_pem,
        "private_key.pem": issued.key_pem,
        "authority.pem": issued.trusted_pem,
    }
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            _write_private(folder / name, content)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{folder}: {reason}", key="out", remedy="name a writable directory") from None
    print(
        f"issued {identity.uri}, valid for {args.days} days, to {folder}. Copy it to the machine, and set there:"
    )
    print("  [cluster]")
    for setting, name in _SETTINGS.items():
        print(f'  {setting} = "{folder.resolve() / name}"')


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, in place of an older one."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    _write_new(new, content)
    new.replace(path)


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that only this user can read. Raises FileExistsError if there is one."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, authority: ClusterAuthority, *, exclusive: bool) -> None:
    """Write the key file. `exclusive`: refuse to replace one."""
    try:
        if exclusive:  # two commands at the same time must not both succeed
            _write_new(path, authority.to_pem())
        else:
            _write_private(path.resolve(), authority.to_pem())  # the file of a link, not the link
    except FileExistsError:
        raise ConfigError(
            f"{path} exists", key="cluster.key", remedy="use it, rotate it, or name another file"
        ) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: {reason}", key="cluster.key", remedy="name a writable file") from None
