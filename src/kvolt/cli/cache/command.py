"""`kvolt cache`: inspect and clean up KV blocks on disk and in object stores; serve a shared KV pool."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from kvolt.cli.cache.object_store import (
    check_objects,
    evict_objects,
    export_object,
    ls_objects,
    stat_objects,
)
from kvolt.cli.cache.shared_pool import configure_serve, serve_pool, stat_pool
from kvolt.cli.flags import option, switch
from kvolt.core.errors import ConfigError
from kvolt.core.ids import BlockKey
from kvolt.kv.disk.view import DiskPart, decode_block, evict, find_parts, read_blocks, verify
from kvolt.models.fetch_progress import size_text
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.host.environment import cache_directory

HELP = """
Inspect and clean up KV blocks on disk (--kv-disk) and in object stores (--kv-object), and serve a KV pool to the
workers of a host. KV blocks can be evicted at any time; they are recomputed when needed.

Examples:
  kvolt cache stat                        number and size of blocks, by directory
  kvolt cache stat /mnt/kv                of another directory (--kv-disk-dir)
  kvolt cache ls                          all blocks: key, position in the sequence, directory
  kvolt cache verify                      read all blocks and verify their checksums
  kvolt cache evict --corrupt             remove blocks with a wrong checksum
  kvolt cache evict --all                 remove all blocks
  kvolt cache export 3fb0... block.bin    write one block to a file
  kvolt cache evict --object s3://bucket/kv --older-than 7d
                                          object stores grow without limit; evict regularly or by a bucket rule
  kvolt cache serve --host 64GiB          KV pool for workers with --kv-pool SOCKET; use the same --join, --namespace
                                          and --config as for the workers. `kvolt serve --kv-shared` starts one itself
  kvolt cache stat --pool                 contents of that pool, found as `kvolt status` finds it
"""


Verb = Callable[[argparse.Namespace], int]


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, of_disk, of_store, text in (
        ("stat", _stat, stat_objects, "show number and size of blocks"),
        ("ls", _ls, ls_objects, "list all blocks"),
        ("verify", _verify, check_objects, "verify the checksums of all blocks"),
        ("evict", _evict, evict_objects, "remove blocks"),
        ("export", _export, export_object, "write one block to a file"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        where = verb.add_mutually_exclusive_group()
        option(where, "--dir", "DIR", "Directory of the disk tier. Default: the user's cache directory.")
        if name != "export":
            # SUPPRESS keeps the value of --dir.
            where.add_argument("dir", nargs="?", default=argparse.SUPPRESS, metavar="DIR", help="As --dir.")
        option(where, "--object", "URL", "Object store URL.")
        if name == "stat":
            where.add_argument(
                "--pool",
                nargs="?",
                const="",
                metavar="SOCKET",
                help="Socket of a pool. Default: that of the running one.",
            )
        if name in ("stat", "ls"):
            switch(verb, "--json", "Print JSON.")
        if name == "evict":
            which = verb.add_mutually_exclusive_group(required=True)
            switch(which, "--all", "Remove all blocks.")
            switch(which, "--corrupt", "Remove blocks with a wrong checksum.")
            option(which, "--older-than", "AGE", "Remove objects older than this: 30m, 12h or 7d.")
            which.add_argument(
                "--key",
                action="append",
                metavar="HEX",
                help="Remove the block with this key or key prefix; repeatable.",
            )
        if name == "export":
            verb.add_argument("key", metavar="HEX", help="Key or key prefix of the block.")
            verb.add_argument("file", help="Output file.")
        verb.set_defaults(without_config=partial(_run, of_disk, of_store))
    text = "serve a KV pool shared by the workers of this host"
    verb = verbs.add_parser("serve", help=text, description=text)
    configure_serve(verb)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Run `serve`, the only sub-verb that uses the config."""
    return serve_pool(args, loaded)


def _run(of_disk: Verb, of_store: Verb, args: argparse.Namespace) -> int:
    if getattr(args, "pool", None) is not None:
        return stat_pool(args)
    return of_store(args) if args.object else of_disk(args)


def _parts(args: argparse.Namespace) -> list[DiskPart]:
    return find_parts(Path(args.dir).expanduser() if args.dir else cache_directory() / "kv")


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
        owner = "in use by a worker" if part.is_owned else "not in use"
        print(f"{part.folder}: {owner}")
        print(f"  {len(part.blocks):,} of {part.num_slots:,} blocks, {size_text(part.num_bytes)}")
        ranks = "" if part.shape.num_ranks == 1 else f" of {part.shape.num_ranks} ranks"
        form = "" if part.form is None else f", {part.form.dtype} as fp8 (lossy)"
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
        print(f"{part.folder}: {len(part.blocks) - len(bad):,} of {len(part.blocks):,} blocks are valid")
        if bad and part.is_owned:
            print("  in use by a worker: blocks replaced during the check appear corrupt")
    return 1 if num_bad else 0


def _bad_of(part: DiskPart) -> list[BlockKey]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=len(part.blocks))
        return verify(part, lambda number: bar.update(task, completed=number))


def _evict(args: argparse.Namespace) -> int:
    if args.older_than:
        raise ConfigError(
            "disk tiers do not record the age of blocks",
            key="older-than",
            remedy="use --object; disk tiers evict by themselves",
        )
    num_gone = 0
    for part in _parts(args):
        if args.corrupt:
            keys = _bad_of(part)
        elif args.all:
            keys = [each.block.key for each in part.blocks]
        else:
            prefixes = tuple(key.lower() for key in args.key if key)
            keys = [each.block.key for each in part.blocks if each.block.key.hex().startswith(prefixes)]
        num_gone += evict(part, keys) if keys else 0
    print(f"{num_gone:,} blocks removed")
    return 0


def _export(args: argparse.Namespace) -> int:
    matches = [
        (part, each)
        for part in _parts(args)
        for each in part.blocks
        if each.block.key.hex().startswith(args.key.lower())
    ]
    if len({each.block.key for _, each in matches}) != 1:
        count = f"{len(matches)} blocks" if matches else "no block"
        raise ConfigError(f"{count} with key prefix {args.key}", key="key", remedy="see `kvolt cache ls`")
    part, each = matches[0]
    [(_, data)] = read_blocks(part, [each])
    if data is None:
        raise ConfigError(
            f"block {each.block.key.hex()} has a wrong checksum",
            key="key",
            remedy="`kvolt cache evict --corrupt`",
        )
    data = decode_block(part, data)
    Path(args.file).write_bytes(data)
    form = "" if part.form is None else f" of {part.form.dtype}, decoded from fp8"
    print(f"{len(data):,} bytes{form}")
    return 0
