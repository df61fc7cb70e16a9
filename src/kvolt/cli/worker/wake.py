"""`kvolt worker wake`: wake the engines that `kvolt worker sleep` has put to sleep."""

from __future__ import annotations

import argparse

from kvolt.cli.flags import CLIENT_GROUPS
from kvolt.cli.worker.sleep import add_names, control_workers
from kvolt.runtime.config.loader import LoadedConfig

HELP = """
Wake the engines that `kvolt worker sleep` has put to sleep, and accept requests again.

Examples:
  kvolt worker wake worker-0
  kvolt worker wake                 all workers
"""

SETTINGS = CLIENT_GROUPS


def configure(parser: argparse.ArgumentParser) -> None:
    add_names(parser)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    return control_workers(args.names, loaded, "wake_up", 0.0, "awake")
