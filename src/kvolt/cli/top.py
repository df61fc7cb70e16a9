"""`kvolt top`: show running processes, refreshed periodically."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
Show running processes like `kvolt status`, refreshed until q or Ctrl-C. Without a terminal (a pipe, a file, cron) it
prints once and exits.

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
            with _quit_key() as quit, Live(first, console=screen, screen=True, auto_refresh=False) as live:
                while True:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(max(args.interval, 0.1)):
                            await quit.wait()
                            return 0
                    live.update(await _picture(cluster, loaded.settings.namespace), refresh=True)

    return run_loop(main)


@contextmanager
def _quit_key() -> Iterator[asyncio.Event]:
    """An event that is set when q is pressed, if stdin is a terminal."""
    pressed = asyncio.Event()
    if sys.stdin is None or not sys.stdin.isatty():
        yield pressed
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def on_input() -> None:
        keys = os.read(descriptor, 64)
        if not keys:  # the terminal is gone
            loop.remove_reader(descriptor)
        elif b"q" in keys.lower():
            pressed.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, on_input)
    try:
        yield pressed
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


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
