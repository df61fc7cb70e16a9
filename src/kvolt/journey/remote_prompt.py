"""The prompt of one request where somebody else computes it than answers.

Owns who is at it or has done so, who keeps its KV until that is fetched, and where its time went. Prefill-first it is
computed before anybody is asked for the answer (`Prompt.compute`); decode-first meanwhile (`decode_first.meet`).
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.errors import KvoltError, Unavailable
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request
from kvolt.journey.prefill import Leg, PrefillCall
from kvolt.journey.stats import JourneyStats
from kvolt.journey.withdrawal import let_go
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)


class Prompt:
    """See the module. `let_go` when its request is over."""

    __slots__ = (
        "_call",
        "_done",
        "_kept_by",
        "_stats",
        "asked",
        "crew",
        "decision",
        "leg",
        "request",
        "stages",
    )

    def __init__(self, leg: Leg, request: Request, crew: Crew, stats: JourneyStats) -> None:
        """`crew`: for what nobody waits for."""
        self.leg = leg
        self.request = request
        self.crew = crew
        self._stats = stats
        self._call: PrefillCall | None = None
        """Under way."""
        self._done: PrefillCall | None = None
        self._kept_by: Instance | None = None
        """Who keeps its KV, until somebody has fetched it."""
        self.asked: InstanceId | None = None
        """Whom `compute` has asked last."""
        self.decision: Decision | None = None
        """Where it was computed."""
        self.stages: StageTimes | None = None

    @property
    def under_way(self) -> Decision | None:
        """Where it is being computed."""
        return None if self._call is None else self._call.decision

    def new_call(self, name: RequestId) -> PrefillCall:
        """For one worker, by that name."""
        asked = msgspec.structs.replace(self.request, request_id=name, prefill_only=True)
        return PrefillCall(self.leg, asked, self.crew)

    async def compute(self, excluded: frozenset[InstanceId], deadlines: Deadlines) -> Handoff:
        """By one worker, to its end. KvoltError when it was not; `asked` is then who has failed."""
        self.asked = None
        if not self.leg.candidates():  # they have gone meanwhile
            raise Unavailable("no prefill worker can be reached", reason="no_workers")
        call = self._call = self.new_call(self.request.request_id)
        try:
            handoff = await call.run(excluded, deadlines)
        except KvoltError as error:
            self.fail(error)
            raise
        finally:
            self._call = None
            self.asked = None if call.decision is None else call.decision.instance.id
        assert call.decision is not None
        self._done = call
        self._kept_by = call.decision.instance if handoff.ticket else None
        return handoff

    def accept(self) -> None:
        """What was computed is gone on with."""
        assert self._done is not None
        self.stages = StageTimes(queue_ms=self._done.wait_s * 1e3)
        self._count(self._done)

    # --- decode-first

    def begin(self, call: PrefillCall) -> None:
        """It is computed from now on, beside the answer."""
        self._call = call
        self.stages = StageTimes(queue_ms=call.wait_s * 1e3)

    def end(self, call: PrefillCall, is_computed: bool) -> None:
        """One of those that were begun; another may have taken its place."""
        if self._call is call:
            self._call = None
        if is_computed:
            self._count(call)

    # ---

    def fail(self, error: KvoltError) -> None:
        """It was not computed: another worker is asked, or whoever answers."""
        log.info("remote prefill failed: request=%s reason=%s", self.request.request_id, error.message)
        self._stats.prefill_failures[error.code] += 1

    def _count(self, call: PrefillCall) -> None:
        self._stats.num_prefills += 1
        self.decision = call.decision
        if self.stages is not None:
            self.stages = msgspec.structs.replace(self.stages, prefill_ms=call.took_s * 1e3)

    def fetched(self) -> None:
        """Who answers has its KV, or does without."""
        self._kept_by = None

    def add(self, stages: StageTimes) -> bool:
        """How its KV came, as who answers says; whether it came from here."""
        if self.stages is None:
            return False
        self.stages = msgspec.structs.replace(stages, **_known(self.stages))
        return True

    def stop(self) -> None:
        """Whoever is at it need not go on."""
        if self._call is not None:
            self._call.cancel()

    def let_go(self) -> None:
        """Nobody will fetch what was computed, unless somebody has."""
        self.stop()
        kept_by, self._kept_by = self._kept_by, None
        if kept_by is not None:
            let_go(self.crew, self.leg.client.plane, kept_by, self.request.request_id)


def _known(stages: StageTimes) -> dict[str, Any]:
    return {name: value for name in stages.__struct_fields__ if (value := getattr(stages, name)) is not None}
