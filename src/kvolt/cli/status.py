"""`kvolt status`: show running processes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvolt.api.cluster import ProcessView, visit
from kvolt.cli.flags import switch
from kvolt.cli.frontends import no_cluster_text
from kvolt.cli.process import run_loop
from kvolt.core.endpoints import ATTACHED_DETAILS, QUEUE_DETAILS
from kvolt.router.breaker import BREAKER_DETAILS
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.network import split_address

HELP = """
Show running processes with their endpoints, state, load and streams; `waiting` of a frontend or router is its router
queue. Exit code: 1 if no process runs, or if a registered process is unreachable.

Examples:
  kvolt status
  kvolt status --json
  kvolt status --join 10.0.0.5:7400
"""


def configure(parser: argparse.ArgumentParser) -> None:
    switch(parser, "--json", "Print JSON.")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    async def main() -> int:
        async with visit(loaded.settings) as cluster:
            views = await cluster.list_processes()
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(views), indent=2).decode())
        elif not views:
            print(f"{no_cluster_text(loaded.settings)}; start with `kvolt serve`")
        else:
            console().print(picture(views))
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
    "HTTP",
    "address",
)
_SERVE_COLUMN = "serve"
"""Process id of the `kvolt serve` that runs the process, shown if there are several."""


def console() -> Console:
    """Console with a wide fixed width if stdout is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 160)


def picture(views: list[ProcessView]) -> Group:
    """Table of processes, followed by unreachable processes, attached servers that are not used, and open circuit
    breakers."""
    are_several = len({_serve(view) for view in views if view.status is not None}) > 1
    grid = Table(*_COLUMNS, *([_SERVE_COLUMN] if are_several else []), box=None)
    for view in views:
        # Text cells: brackets in names would be parsed as markup.
        cells = (*_cells(view), _serve(view)) if are_several else _cells(view)
        grid.add_row(*(Text(cell, style="" if view.status else "red") for cell in cells))
    problems = [
        Text(f"{view.name} at {view.address} does not answer: {view.problem}", style="red")
        for view in views
        if view.status is None
    ]
    return Group(grid, *problems, *_unused_servers(views), *_breakers(views))


def _unused_servers(views: list[ProcessView]) -> list[Text]:
    """One line for each attached server that has failed or is waited for."""
    return [
        Text(f"server {each['url']} {each['state']}: {each['reason'] or 'no answer yet'}", style="red")
        for view in views
        if view.status is not None
        for each in view.status.details.get(ATTACHED_DETAILS, ())
        if each["state"] != "attached"
    ]


def _breakers(views: list[ProcessView]) -> list[Text]:
    """One line for each open or half-open circuit breaker."""
    process_of = {
        endpoint.instance: view.name
        for view in views
        if view.status is not None
        for endpoint in view.status.endpoints
    }
    return [
        Text(
            f"breaker {each['state']}: worker {process_of.get(each['worker'], '?')} ({each['worker']}) is expected to "
            f"fail {each['failure_rate']:.0%} of its requests; next probe in {each['retry_in_s']:.0f} s, "
            f"says {view.name}",
            style="yellow",
        )
        for view in views
        if view.status is not None
        for each in view.status.details.get(BREAKER_DETAILS, ())
    ]


def _cells(view: ProcessView) -> tuple[str, ...]:
    """Cells for `_COLUMNS`."""
    if view.status is None:
        return (view.name, "", "", "", "unreachable", "", "", "", "", "", _http_port(view), view.address)
    engine = view.status.details.get("engine", {})
    load = engine.get("load", {})
    queue = view.status.details.get(QUEUE_DETAILS, {})
    total = load.get("kv_total_blocks", 0)
    states = sorted({endpoint.state.value for endpoint in view.status.endpoints})
    if engine.get("asleep"):
        states = ["asleep"]
    streams = sum(endpoint.active_streams for endpoint in view.status.endpoints)
    return (
        view.name,
        str(engine.get("model", "")),
        str(engine.get("role", _kind(view.status.details))),
        str(engine.get("engine", "")),
        ", ".join(states),
        str(streams if engine else view.status.calls_open),
        str(load.get("running", 0)) if engine else "",
        str(load.get("waiting", 0)) if engine else str(queue.get("requests", "")),
        f"{load.get('kv_used_blocks', 0) / total:.0%}" if total else "",
        _duration(view.status.uptime_s),
        _http_port(view),
        view.address,
    )


def _http_port(view: ProcessView) -> str:
    return "" if view.http is None else f":{split_address(view.http)[1]}"


def _serve(view: ProcessView) -> str:
    pid = None if view.status is None else view.status.supervisor_pid
    return "" if pid is None else str(pid)


def _kind(details: Mapping[str, Any]) -> str:
    """Role of a process without an engine."""
    return next((kind for kind in ("router", "pool") if kind in details), "frontend")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f}s"
    if seconds < 7200:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.1f}h"
