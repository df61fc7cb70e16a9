"""Several HTTP processes on one port, with a router process and a shared request count."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvolt.api.cluster import visit
from kvolt.cli.health import Served
from kvolt.frontend.shared_count import EDGE_DETAILS, SharedCounts
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.network import reserved_port
from kvolt.runtime.supervisor.supervisor import ChildSpec, ChildStatus

_COMMAND = (sys.executable, "-m", "kvolt")
_COUNTS_FILE = "edge.counts"


def num_edge_processes(settings: Settings) -> int:
    """Number of frontend processes, plus the router process if there are several."""
    num_frontends = settings.frontend.processes
    return num_frontends if num_frontends == 1 else num_frontends + 1


class EdgeGroup:
    """HTTP processes and their router process, for the supervisor."""

    def __init__(self, settings: Settings, counts: SharedCounts, counts_path: Path) -> None:
        self._settings = settings
        self._counts = counts
        self._counts_path = counts_path
        self._id = secrets.token_hex(4)
        self._slots = {f"frontend-{slot}": slot for slot in range(settings.frontend.processes)}

    def specs(self, for_router: Path, for_http: Path) -> list[ChildSpec]:
        """Child processes. HTTP processes stop first (stage 1), while workers still serve their requests.

        The router process also runs the join server, since there is only one.
        """
        http = [
            ChildSpec(
                name,
                (
                    *(*_COMMAND, "frontend", "--config", str(for_http), "--name", name),
                    *("--group", self._id, "--slot", str(slot), "--counts", str(self._counts_path)),
                ),
                stage=1,
            )
            for name, slot in self._slots.items()
        ]
        router = ChildSpec("router", (*_COMMAND, "router", "--config", str(for_router)))
        return [*http, router]

    def on_event(self, child: ChildStatus) -> None:
        """Reset the shared request count of a process that has ended."""
        slot = self._slots.get(child.name)
        if slot is not None and child.pid is None:
            self._counts.set_count(slot, 0)

    async def served_by_all(self) -> Served | None:
        """Models that every process of the group serves, with the workers that all of them reach.

        None while a process is missing or not connected to the router.
        """
        async with visit(self._settings) as cluster:
            views = await cluster.list_processes()
        details = [view.status.details.get(EDGE_DETAILS) for view in views if view.status is not None]
        edges = [edge for edge in details if isinstance(edge, dict) and edge.get("group") == self._id]
        if len(edges) < len(self._slots) or not all(edge["router"] for edge in edges):
            return None
        first, *others = [edge["models"] for edge in edges]
        return {
            name: {
                role: min([count, *(models.get(name, {}).get(role, 0) for models in others)])
                for role, count in roles.items()
            }
            for name, roles in first.items()
        }


@contextmanager
def edge_group(settings: Settings, folder: Path) -> Iterator[EdgeGroup | None]:
    """Port and shared memory of several HTTP processes; None for a single process."""
    if settings.frontend.processes == 1:
        yield None
        return
    path = folder / _COUNTS_FILE
    with reserved_port(settings.frontend.host, settings.frontend.port):
        counts = SharedCounts.create(path, settings.frontend.processes)
        try:
            yield EdgeGroup(settings, counts, path)
        finally:
            counts.close()
            path.unlink(missing_ok=True)
