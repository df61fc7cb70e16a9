"""One HTTP process as one of several on a port: what it shares with the others, ready to be used."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvolt.cli.process import Process
from kvolt.frontend.admission import Admission
from kvolt.frontend.models import Models
from kvolt.frontend.roles import workers_of
from kvolt.frontend.shared_count import SharedCounts, SharedSlot
from kvolt.frontend.siblings import Group, Siblings, sibling_endpoint
from kvolt.router.service.client import RouterLink

EDGE_DETAILS = "edge"
"""What such a process tells of itself in its status: group, models with their workers, router."""

SETTLE_S = 5.0
"""For discovery to be read and cards to be fetched before the port opens; what takes longer is a 503 until then."""


class Member(msgspec.Struct, frozen=True):
    """What its supervisor tells a process on the command line."""

    group: str
    slot: int
    counts: Path
    """The table that all of the group count in."""


class Membership:
    """A process's part in its group."""

    def __init__(self, process: Process, member: Member, link: RouterLink) -> None:
        self._process = process
        self._member = member
        self._link = link
        self._counts = SharedCounts(member.counts)
        self._siblings: Siblings | None = None
        self.slot = SharedSlot(self._counts, member.slot)

    def siblings(self, admission: Admission) -> Siblings:
        settings = self._process.settings
        self._siblings = Siblings(
            self._process.runtime,
            sibling_endpoint(settings.namespace, self._member.group),
            Group(self._member.slot, self._counts.num_slots),
            admission,
            self._process.metrics.registry,
            settings.frontend.metrics_prefix,
        )
        return self._siblings

    async def settle(self, models: Models) -> None:
        """Until we know what our siblings know: from then on any connection to the port may come to us."""
        assert self._siblings is not None
        await self._siblings.start()
        await self._link.wait_synced(SETTLE_S)
        await models.settle(SETTLE_S)
        self._process.runtime.add_details(
            EDGE_DETAILS,
            lambda: {
                "group": self._member.group,
                "models": {model.card.name: workers_of(model) for model in models.ready()},
                "router": self._link.present,
            },
        )

    async def close(self) -> None:
        if self._siblings is not None:
            await self._siblings.close()
