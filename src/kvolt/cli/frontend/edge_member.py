"""Membership of an HTTP process in a group of processes that share a port."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvolt.cli.process import Process
from kvolt.frontend.admission import Admission
from kvolt.frontend.model import count_workers
from kvolt.frontend.models import Models
from kvolt.frontend.shared_count import EDGE_DETAILS, SharedCounts, SharedSlot
from kvolt.frontend.siblings import SiblingGroup, Siblings, sibling_endpoint
from kvolt.router.service.link import RouterLink

SETTLE_S = 5.0
"""Maximum wait for discovery and model cards before the port opens; models that take longer answer 503 until then."""


class Member(msgspec.Struct, frozen=True):
    """Command line arguments that the supervisor passes to the process."""

    group: str
    slot: int
    counts: Path
    """File with the request counts of the group."""


class Membership:
    """The process's siblings, shared request count and status details."""

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
            SiblingGroup(self._member.slot, self._counts.num_slots),
            admission,
            self._process.metrics.registry,
            settings.metrics.aliases,
        )
        return self._siblings

    async def settle(self, models: Models) -> None:
        """Wait for siblings, router and models, since any connection to the port may reach this process."""
        assert self._siblings is not None
        await self._siblings.start()
        await self._link.wait_synced(SETTLE_S)
        await models.wait_settled(SETTLE_S)
        self._process.runtime.add_status_details(
            EDGE_DETAILS,
            lambda: {
                "group": self._member.group,
                "models": {model.card.name: count_workers(model) for model in models.ready()},
                "router": self._link.present,
            },
        )

    async def close(self) -> None:
        if self._siblings is not None:
            await self._siblings.close()
