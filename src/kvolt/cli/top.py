"""`kvolt top`: show running processes, refreshed periodically."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Group
from rich.live import Live
from rich.text import Text

from kvolt.api.cluster import Cluster, ProcessView, visit
from kvolt.cli.flags import option, switch
from kvolt.cli.process import run_loop
from kvolt.cli.status import console, picture
from kvolt.core.errors import DiscoveryLost
from kvolt.runtime.config.loader import LoadedConfig

HELP = """
Show running processes like `kvolt status`, refreshed until Ctrl-C. Without a terminal (a pipe, a file, cron) it prints
once and exits.

Examples:
  kvolt top
  kvolt top --interval 0.5
  kvolt top --once               print once and exit
"""


def configure(parser: argparse.ArgumentParser) -> None:
    option(parser, "--interval", "SECONDS", "Refresh interval.", float, default=1.0)
    switch(parser, "--once", "Print once and exit.")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    async def main() -> int:
        screen = console()
        async with visit(loaded.settings) as cluster:
            if args.once or not screen.is_terminal:
                screen.print(_draw(await cluster.list_processes(), loaded.settings.namespace))
                return 0
            first = await _picture(cluster, loaded.settings.namespace)
            with Live(first, console=screen, screen=True, auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(max(args.interval, 0.1))
                    live.update(await _picture(cluster, loaded.settings.namespace), refresh=True)

    return run_loop(main)


async def _picture(cluster: Cluster, namespace: str) -> Group:
    try:
        return _draw(await cluster.list_processes(), namespace)
    except DiscoveryLost as error:
        return Group(Text(f"discovery is unreachable: {error.message}", style="red"))


def _draw(views: list[ProcessView], namespace: str) -> Group:
    streams = sum(
        endpoint.active_streams for view in views if view.status for endpoint in view.status.endpoints
    )
    title = Text(f"kvolt {namespace}: {len(views)} processes, {streams} streams")
    return Group(title, Text(), picture(views))
