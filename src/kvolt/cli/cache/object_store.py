"""`kvolt cache ... --object URL`: inspect and clean up KV blocks in an object store."""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np

from kvolt.core.errors import ConfigError
from kvolt.kv.object_store.blocks import ObjectBlocks
from kvolt.kv.object_store.view import StoredObject, list_objects, remove_objects, verify_objects
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.models.fetch_progress import size_text

_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}


def stat_objects(args: argparse.Namespace) -> int:
    by_shape: dict[BlockShape, list[StoredObject]] = {}
    for each in list_objects(args.object):
        by_shape.setdefault(each.shape, []).append(each)
    rows = [
        {
            "store": args.object,
            "block_bytes": shape.block_bytes,
            "ranks": shape.num_ranks,
            "blocks": len(objects),
            "bytes": sum(each.num_bytes for each in objects),
            "oldest": min(each.written_at for each in objects),
            "newest": max(each.written_at for each in objects),
        }
        for shape, objects in by_shape.items()
    ]
    if args.json:
        print(msgspec.json.encode(rows).decode())
    elif not rows:
        print(f"{args.object}: no blocks")
    else:
        for row in rows:
            print(
                f"{row['store']}: {row['blocks']:,} blocks of {size_text(row['block_bytes'])}, "
                f"{size_text(row['bytes'])}, from {row['oldest']:%Y-%m-%d %H:%M} to {row['newest']:%Y-%m-%d %H:%M}"
            )
    return 0


def ls_objects(args: argparse.Namespace) -> int:
    for each in list_objects(args.object):
        if args.json:
            row = {
                "key": each.key.hex(),
                "bytes": each.num_bytes,
                "written_at": each.written_at,
                "path": each.path,
            }
            print(msgspec.json.encode(row).decode())
        else:
            print(f"{each.key.hex()}  {each.written_at:%Y-%m-%d %H:%M:%S}  {each.path}")
    return 0


def check_objects(args: argparse.Namespace) -> int:
    objects = list(list_objects(args.object))
    bad = _spoiled(args.object, objects)
    for each in bad:
        print(f"corrupt: {each.key.hex()} at {each.path}")
    print(f"{args.object}: {len(objects) - len(bad):,} of {len(objects):,} blocks are valid")
    return 1 if bad else 0


def _spoiled(url: str, objects: list[StoredObject]) -> list[StoredObject]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=len(objects))
        bad = []
        for each, is_bad in verify_objects(url, objects):
            bar.advance(task)
            if is_bad:
                bad.append(each)
        return bad


def evict_objects(args: argparse.Namespace) -> int:
    objects = list(list_objects(args.object))
    if args.corrupt:
        objects = _spoiled(args.object, objects)
    elif args.older_than:
        before = datetime.now(UTC) - _age(args.older_than)
        objects = [each for each in objects if each.written_at < before]
    elif not args.all:
        prefixes = tuple(key.lower() for key in args.key if key)
        objects = [each for each in objects if each.key.hex().startswith(prefixes)]
    remove_objects(args.object, objects)
    print(f"{len(objects):,} blocks removed")
    return 0


def _age(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,5})([mhd])", text)
    if match is None:
        raise ConfigError(f"invalid age {text}", key="older-than", remedy="for example 30m, 12h or 7d")
    return int(match[1]) * _UNITS[match[2]]


def export_object(args: argparse.Namespace) -> int:
    objects = [each for each in list_objects(args.object) if each.key.hex().startswith(args.key.lower())]
    if len(objects) != 1:
        count = f"{len(objects)} blocks" if objects else "no block"
        raise ConfigError(
            f"{count} with key prefix {args.key}",
            key="key",
            remedy="see `kvolt cache ls --object`",
        )
    memory, blocks = SlotMemory(objects[0].shape, 1), ObjectBlocks(args.object, objects[0].shape)
    try:
        [outcome] = blocks.read([objects[0].key], memory, np.zeros(1, dtype=np.int64))
        if not isinstance(outcome, int):
            raise ConfigError(
                f"block {objects[0].key.hex()} has a wrong checksum",
                key="key",
                remedy="`kvolt cache evict --corrupt`",
            )
        with memory.block(0) as view:
            Path(args.file).write_bytes(view)
            print(f"{len(view):,} bytes")
    finally:
        blocks.close()
        memory.close()
    return 0
