"""`kvolt status`: the live cluster, once."""

from __future__ import annotations

import argparse
import sys

import msgspec
from rich.console import Console
from rich.table import Table

from kvolt.cli.cluster import ProcessView, visit
from kvolt.cli.process import run_loop
from kvolt.runtime.config import LoadedConfig

HELP = """
Show what is running: processes, their endpoints and state, load and streams. Exit code 1 when nothing
is, or when a registered process does not answer.

Examples:
  kvolt status
  kvolt status --json
  kvolt status --join 10.0.0.5:7400
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    async def main() -> int:
        async with visit(loaded.settings) as cluster:
            views = await cluster.look()
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(views), indent=2).decode())
        elif not views:
            where = loaded.settings.discovery.join or loaded.settings.discovery.path
            namespace = loaded.settings.namespace
            print(f"nothing runs in namespace {namespace!r} ({where}); start with `kvolt serve`")
        else:
            console().print(table(views))
        return 0 if views and all(view.status is not None for view in views) else 1

    return run_loop(main)


_COLUMNS = (
    "process",
    "model",
    "role",
    "engine",
    "state",
    "streams",
    "running",
    "waiting",
    "KV",
    "up",
    "address",
)


def console() -> Console:
    """Plain output that is no terminal is not cut to 80 columns."""
    return Console(width=None if sys.stdout.isatty() else 160)


def table(views: list[ProcessView]) -> Table:
    grid = Table(*_COLUMNS, box=None)
    for view in views:
        if view.status is None:
            grid.add_row(view.name, "", "", "", "[red]unreachable[/red]", "", "", "", "", "", view.address)
            continue
        engine = view.status.details.get("engine", {})
        load = engine.get("load", {})
        total = load.get("kv_total_blocks", 0)
        states = sorted({endpoint.state.value for endpoint in view.status.endpoints})
        streams = sum(endpoint.active_streams for endpoint in view.status.endpoints)
        grid.add_row(
            view.name,
            engine.get("model", ""),
            engine.get("role", "frontend"),
            engine.get("engine", ""),
            ", ".join(states),
            str(streams if engine else view.status.calls_open),
            str(load.get("running", 0)) if engine else "",
            str(load.get("waiting", 0)) if engine else "",
            f"{load.get('kv_used_blocks', 0) / total:.0%}" if total else "",
            _duration(view.status.uptime_s),
            view.address,
        )
    return grid


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f}s"
    if seconds < 7200:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.1f}h"
