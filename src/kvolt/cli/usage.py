"""`kvolt usage`: requests and tokens of each tenant."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from rich.table import Table

from kvolt.api.cluster import ProcessView, visit
from kvolt.cli.flags import switch
from kvolt.cli.process import run_loop
from kvolt.cli.status import console
from kvolt.frontend.tenants.usage import USAGE_DETAILS, TenantUsage
from kvolt.runtime.config.loader import LoadedConfig

HELP = """
Show requests and tokens of each tenant since the start of the running frontends, summed over them (docs/api-keys.md).

Examples:
  kvolt usage
  kvolt usage --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    switch(parser, "--json", "Print JSON.")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    async def main() -> int:
        async with visit(loaded.settings) as cluster:
            views = await cluster.list_processes()
        usage = total_usage(views)
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(usage), indent=2).decode())
        elif not usage:
            print("no requests with API keys yet; frontends require keys with --api-keys FILE")
        else:
            console().print(_table(usage), markup=False)
        for view in views:
            if view.status is None:
                console().print(
                    f"{view.name} at {view.address} does not answer: {view.problem}", markup=False
                )
        return 0

    return run_loop(main)


def total_usage(views: Iterable[ProcessView]) -> dict[str, TenantUsage]:
    """Usage by tenant, sorted by name; frontends of another version are left out."""
    total: dict[str, TenantUsage] = {}
    for view in views:
        details: Mapping[str, Any] = {} if view.status is None else view.status.details
        try:
            usage = msgspec.convert(details.get(USAGE_DETAILS, {}), dict[str, TenantUsage])
        except msgspec.ValidationError:
            continue
        for tenant, each in usage.items():
            total.setdefault(tenant, TenantUsage()).add(each)
    return dict(sorted(total.items()))


def _table(usage: Mapping[str, TenantUsage]) -> Table:
    table = Table("tenant", "requests", "active", "input tokens", "output tokens", "refused", box=None)
    for tenant, each in usage.items():
        refused = ", ".join(f"{reason} {count}" for reason, count in sorted(each.refused.items()))
        counts = (each.requests, each.active, each.input_tokens, each.output_tokens)
        table.add_row(tenant, *map(str, counts), refused)
    return table
