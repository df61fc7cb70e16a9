"""`kvolt cluster`: create, show and rotate a cluster key."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

from kvolt.cli.flags import optional
from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.security.authority import ClusterAuthority

HELP = """
Create a cluster key. Processes that have it authenticate each other and encrypt their connections (docs/security.md).

Examples:
  kvolt cluster init                              write ./kvolt.key, readable by you only
  kvolt cluster show kvolt.key                    fingerprint, to compare the files of two machines
  kvolt cluster rotate kvolt.key                  replace the key in the file; running processes accept old and new
  kvolt serve --cluster-key kvolt.key
"""

_DEFAULT = "kvolt.key"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (
        ("init", "create a key file"),
        ("show", "print the fingerprint and expiry of a key file"),
        ("rotate", "replace the key in a file; copy it to all machines afterwards, in any order"),
    ):
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        optional(action, "file", "FILE", f"Key file. Default: {_DEFAULT}.")


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
    else:
        authority = ClusterAuthority.load(path)
        expiry = datetime.fromtimestamp(authority.expires_at, UTC)
        print(f"{path}: fingerprint {authority.fingerprint}, expires {expiry:%Y-%m-%d}")
    return 0


def _write(path: Path, authority: ClusterAuthority, *, exclusive: bool) -> None:
    """Write the file atomically, readable by this user only."""
    new = path.with_name(f".{path.name}.new")
    try:
        if exclusive and path.exists():
            raise FileExistsError
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(authority.to_pem())
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(new, path)  # unlike a rename, fails if another process has created it
            new.unlink()
        else:
            new.replace(path)
    except FileExistsError:
        new.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} exists", key="cluster.key", remedy="use it, rotate it, or name another file"
        ) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: {reason}", key="cluster.key", remedy="name a writable file") from None
