"""`kvolt cache`: KV that disk tiers keep, looked at and tended from outside."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from kvolt.cli.cache.object_store import (
    evict_objects,
    export_object,
    list_objects,
    stat_objects,
    verify_objects,
)
from kvolt.cli.cache.shared_pool import configure_serve, serve_pool, stat_pool
from kvolt.core.errors import ConfigError
from kvolt.core.ids import BlockKey
from kvolt.kv.disk.view import Part, engines_bytes, evict, parts_in, read_blocks, verify
from kvolt.models.fetch_progress import size_text
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.host.cache_directory import cache_directory

HELP = """
KV blocks that workers keep on a disk (`kvolt serve --kv-host 4GiB --kv-disk 50GiB`), each in a part of the folder, or
share in an object store (`--kv-object s3://bucket/kv`). Nothing there is the only copy: what is removed is computed
again.

  kvolt cache stat                        how much is there, and who has it
  kvolt cache ls                          every block: its key, place in its sequence, part
  kvolt cache verify                      read all of it, and hold it against its checksums
  kvolt cache evict --corrupt             forget what does not verify
  kvolt cache evict --all                 forget everything
  kvolt cache export 3fb0... block.bin    the bytes of one block

All of these take --object URL. A store is shared, and grows: remove what is old now and then, or by a bucket's rule.

  kvolt cache evict --object s3://bucket/kv --older-than 7d

One pool for the workers of a host, which keep a prefix once then; `kvolt serve --kv-shared` starts one by itself:

  kvolt cache serve --host 64GiB          and workers with --kv-pool SOCKET
                                          (and --join, --namespace or --config as these have: routers are told what
                                          it has)
  kvolt cache stat --pool                 how much it has
"""


Verb = Callable[[argparse.Namespace], int]


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, of_disk, of_store, text in (
        ("stat", _stat, stat_objects, "how much is there, and who has it"),
        ("ls", _ls, list_objects, "every block"),
        ("verify", _verify, verify_objects, "read all blocks and check them"),
        ("evict", _evict, evict_objects, "forget blocks"),
        ("export", _export, export_object, "the bytes of one block"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        where = verb.add_mutually_exclusive_group()
        where.add_argument(
            "--dir", metavar="DIR", help="folder of --kv-disk-dir (default: the user's cache folder)"
        )
        where.add_argument("--object", metavar="URL", help="store of --kv-object")
        if name == "stat":
            where.add_argument(
                "--pool",
                nargs="?",
                const="",
                metavar="SOCKET",
                help="pool of a `kvolt cache serve` (default: its default socket)",
            )
        if name in ("stat", "ls"):
            verb.add_argument("--json", action="store_true", help="for programs")
        if name == "evict":
            which = verb.add_mutually_exclusive_group(required=True)
            which.add_argument("--all", action="store_true", help="everything")
            which.add_argument("--corrupt", action="store_true", help="what does not verify")
            which.add_argument(
                "--older-than", metavar="AGE", help="what a store has for longer: 30m, 12h or 7d"
            )
            which.add_argument(
                "--key", action="append", metavar="HEX", help="a block, by its key or the start of it"
            )
        if name == "export":
            verb.add_argument("key", metavar="HEX", help="the block's key, or the start of it")
            verb.add_argument("file", help="where its bytes go")
        verb.set_defaults(without_config=partial(_run, of_disk, of_store))
    text = "a pool of KV that the workers of this host share, in a process of its own"
    verb = verbs.add_parser("serve", help=text, description=text)
    configure_serve(verb)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    """The one sub-verb that needs the config."""
    return serve_pool(args, loaded)


def _run(of_disk: Verb, of_store: Verb, args: argparse.Namespace) -> int:
    if getattr(args, "pool", None) is not None:
        return stat_pool(args)
    return of_store(args) if args.object else of_disk(args)


def _parts(args: argparse.Namespace) -> list[Part]:
    return parts_in(Path(args.dir).expanduser() if args.dir else cache_directory() / "kv")


def _stat(args: argparse.Namespace) -> int:
    parts = _parts(args)
    if args.json:
        rows = [
            {
                "folder": str(part.folder),
                "blocks": len(part.blocks),
                "bytes": part.num_bytes,
                "capacity_blocks": part.num_slots,
                "block_bytes": part.shape.block_bytes,
                "ranks": part.shape.num_ranks,
                "form": "" if part.form is None else part.form.name,
                "owned": part.is_owned,
            }
            for part in parts
        ]
        print(msgspec.json.encode(rows).decode())
        return 0
    for part in parts:
        owner = "a worker has it" if part.is_owned else "nobody has it now"
        print(f"{part.folder}: {owner}")
        print(f"  {len(part.blocks):,} of {part.num_slots:,} blocks, {size_text(part.num_bytes)}")
        ranks = "" if part.shape.num_ranks == 1 else f" of {part.shape.num_ranks} ranks"
        form = "" if part.form is None else f", {part.form.dtype} in eight bits (lossy)"
        print(f"  {size_text(part.shape.block_bytes)} each{ranks}{form}")
    return 0


def _ls(args: argparse.Namespace) -> int:
    for part in _parts(args):
        for each in part.blocks:
            block = each.block
            if args.json:
                row = {
                    "key": block.key.hex(),
                    "parent": None if block.parent is None else block.parent.hex(),
                    "position": block.position,
                    "sequence_hash": block.sequence_hash,
                    "checksum": f"{each.checksum:016x}",
                    "folder": str(part.folder),
                }
                print(msgspec.json.encode(row).decode())
            else:
                print(f"{block.key.hex()}  {block.position:>6}  {part.folder}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    num_bad = 0
    for part in _parts(args):
        bad = _bad_of(part)
        num_bad += len(bad)
        for key in bad:
            print(f"corrupt: {key.hex()} in {part.folder}")
        print(f"{part.folder}: {len(part.blocks) - len(bad):,} of {len(part.blocks):,} blocks are whole")
        if bad and part.is_owned:
            print("  a worker is writing there: what was replaced meanwhile does not verify")
    return 1 if num_bad else 0


def _bad_of(part: Part) -> list[BlockKey]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=len(part.blocks))
        return verify(part, lambda number: bar.update(task, completed=number))


def _evict(args: argparse.Namespace) -> int:
    if args.older_than:
        raise ConfigError(
            "a disk does not know how old its blocks are",
            key="older-than",
            remedy="name a store with --object; a disk tier makes room by itself",
        )
    num_gone = 0
    for part in _parts(args):
        if args.corrupt:
            keys = _bad_of(part)
        elif args.all:
            keys = [each.block.key for each in part.blocks]
        else:
            wanted = tuple(key.lower() for key in args.key if key)
            keys = [each.block.key for each in part.blocks if each.block.key.hex().startswith(wanted)]
        num_gone += evict(part, keys) if keys else 0
    print(f"{num_gone:,} blocks are forgotten")
    return 0


def _export(args: argparse.Namespace) -> int:
    found = [
        (part, each)
        for part in _parts(args)
        for each in part.blocks
        if each.block.key.hex().startswith(args.key.lower())
    ]
    if len({each.block.key for _, each in found}) != 1:
        told = "no block" if not found else f"{len(found)} blocks"
        raise ConfigError(
            f"{told} have a key that begins with {args.key}", key="key", remedy="see `kvolt cache ls`"
        )
    part, each = found[0]
    [(_, data)] = read_blocks(part, [each])
    if data is None:
        raise ConfigError(
            f"block {each.block.key.hex()} is not what was written",
            key="key",
            remedy="`kvolt cache evict --corrupt`",
        )
    data = engines_bytes(part, data)
    Path(args.file).write_bytes(data)
    form = "" if part.form is None else f" of {part.form.dtype}, from eight bits each"
    print(f"{len(data):,} bytes{form}")
    return 0
