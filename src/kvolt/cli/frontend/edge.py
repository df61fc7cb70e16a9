"""The HTTP edge as several processes on one port: which they are, and what they share while they run."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvolt.cli.cluster import visit
from kvolt.cli.frontend.edge_member import EDGE_DETAILS
from kvolt.cli.health import Served
from kvolt.frontend.shared_count import SharedCounts
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.network import reserved_port
from kvolt.runtime.supervisor.supervisor import ChildSpec, ChildStatus

_COMMAND = (sys.executable, "-m", "kvolt")
_COUNTS_FILE = "edge.counts"


def num_edge_processes(settings: Settings) -> int:
    """How many processes the edge of these settings is: one, or several and their router."""
    wanted = settings.frontend.processes
    return wanted if wanted == 1 else wanted + 1


class EdgeGroup:
    """Several HTTP processes with their router, as their supervisor knows them."""

    def __init__(self, settings: Settings, counts: SharedCounts, counts_path: Path) -> None:
        self._settings = settings
        self._counts = counts
        self._counts_path = counts_path
        self._id = secrets.token_hex(4)
        self._slots = {f"frontend-{slot}": slot for slot in range(settings.frontend.processes)}

    def specs(self, for_router: Path, for_http: Path) -> list[ChildSpec]:
        """The HTTP processes stop first, in stage 1: their requests end while the rest still serves.

        The router is the one that there is once, so it also serves discovery to other machines.
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
        """A process that is gone answers no requests, whatever it had counted; the others need its places."""
        slot = self._slots.get(child.name)
        if slot is not None and child.pid is None:
            self._counts.put(slot, 0)

    async def served_by_all(self) -> Served | None:
        """The models that every process of the group would route, each with the workers that all of them reach.

        None while a process is not there, or does not know the router.
        """
        async with visit(self._settings) as cluster:
            views = await cluster.look()
        told = [view.status.details.get(EDGE_DETAILS) for view in views if view.status is not None]
        mine = [edge for edge in told if isinstance(edge, dict) and edge.get("group") == self._id]
        if len(mine) < len(self._slots) or not all(edge["router"] for edge in mine):
            return None
        first, *others = [edge["models"] for edge in mine]
        return {
            name: {
                role: min([count, *(known.get(name, {}).get(role, 0) for known in others)])
                for role, count in roles.items()
            }
            for name, roles in first.items()
        }


@contextmanager
def edge_group(settings: Settings, folder: Path) -> Iterator[EdgeGroup | None]:
    """The port and the memory that several HTTP processes share, until the end; None for a single one."""
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
