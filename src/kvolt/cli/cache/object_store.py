"""`kvolt cache --object URL`: KV in a store that workers share, looked at and tended."""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np

from kvolt.core.errors import ConfigError
from kvolt.kv.object_store.blocks import ObjectBlocks
from kvolt.kv.object_store.view import ObjectFound, objects_in, remove, spoiled
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.models.fetch_progress import size_text

_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}


def stat_objects(args: argparse.Namespace) -> int:
    by_shape: dict[BlockShape, list[ObjectFound]] = {}
    for each in objects_in(args.object):
        by_shape.setdefault(each.shape, []).append(each)
    rows = [
        {
            "store": args.object,
            "block_bytes": shape.block_bytes,
            "ranks": shape.num_ranks,
            "blocks": len(found),
            "bytes": sum(each.num_bytes for each in found),
            "oldest": min(each.written_at for each in found),
            "newest": max(each.written_at for each in found),
        }
        for shape, found in by_shape.items()
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


def list_objects(args: argparse.Namespace) -> int:
    for each in objects_in(args.object):
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


def verify_objects(args: argparse.Namespace) -> int:
    found = list(objects_in(args.object))
    bad = _spoiled(args.object, found)
    for each in bad:
        print(f"corrupt: {each.key.hex()} at {each.path}")
    print(f"{args.object}: {len(found) - len(bad):,} of {len(found):,} blocks are whole")
    return 1 if bad else 0


def _spoiled(url: str, found: list[ObjectFound]) -> list[ObjectFound]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=len(found))
        bad = []
        for each, is_bad in spoiled(url, found):
            bar.advance(task)
            if is_bad:
                bad.append(each)
        return bad


def evict_objects(args: argparse.Namespace) -> int:
    found = list(objects_in(args.object))
    if args.corrupt:
        found = _spoiled(args.object, found)
    elif args.older_than:
        before = datetime.now(UTC) - _age(args.older_than)
        found = [each for each in found if each.written_at < before]
    elif not args.all:
        wanted = tuple(key.lower() for key in args.key if key)
        found = [each for each in found if each.key.hex().startswith(wanted)]
    remove(args.object, found)
    print(f"{len(found):,} blocks are removed")
    return 0


def _age(text: str) -> timedelta:
    said = re.fullmatch(r"(\d{1,5})([mhd])", text)
    if said is None:
        raise ConfigError(f"{text} is no age", key="older-than", remedy="say 30m, 12h or 7d")
    return int(said[1]) * _UNITS[said[2]]


def export_object(args: argparse.Namespace) -> int:
    found = [each for each in objects_in(args.object) if each.key.hex().startswith(args.key.lower())]
    if len(found) != 1:
        told = f"{len(found)} blocks have" if found else "no block has"
        raise ConfigError(
            f"{told} a key that begins with {args.key}",
            key="key",
            remedy="see `kvolt cache ls --object`",
        )
    memory, blocks = SlotMemory(found[0].shape, 1), ObjectBlocks(args.object, found[0].shape)
    try:
        [came] = blocks.read([found[0].key], memory, np.zeros(1, dtype=np.int64))
        if not isinstance(came, int):
            raise ConfigError(
                f"block {found[0].key.hex()} is not what was written",
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
