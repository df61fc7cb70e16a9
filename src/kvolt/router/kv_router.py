"""KvRouter: to whom a request costs least, by what each worker holds and what it is busy with.

Puts together who may take it (`eligible`), what they hold (an index that somebody feeds), what was sent to them
(`load`) and a policy. Counts its own decisions at once, and what workers report on top. Routing itself awaits nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.ids import InstanceId
from kvolt.core.latency import Floats
from kvolt.core.load import LoadReport
from kvolt.core.request import Request, Role
from kvolt.router.eligible import Eligible
from kvolt.router.expected import ExpectedBlocks
from kvolt.router.load import Booking, LoadBook
from kvolt.router.policy import Policy, RequestView, WorkersView, pick
from kvolt.router.port import Decision
from kvolt.router.roster import Field, Roster
from kvolt.runtime.address import Instance
from kvolt.runtime.client import EndpointClient

_OUTPUT_TOKENS = 256.0
"""Expected of an answer of which nobody said how long it will be."""


class Holders(Protocol):
    """Which worker holds which blocks."""

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """How many blocks of a prompt, from the first on, each slot holds."""
        ...

    def slot_of(self, instance_id: InstanceId) -> int | None:
        """None where nothing is known of it."""
        ...


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float = 0.0


class KvRouter:
    """See the module; a Router."""

    def __init__(
        self,
        client: EndpointClient,
        holders: Holders,
        policy: Policy,
        now: Callable[[], float],
        rng: random.Random,
        options: RouterOptions | None = None,
        role: Role = Role.AGGREGATED,
    ) -> None:
        self._client = client
        self._eligible = Eligible(client, role)
        self._holders = holders
        self._policy = policy
        self._now = now
        self._rng = rng
        self._options = options or RouterOptions()
        self._book = LoadBook()
        self._expected = ExpectedBlocks()
        self._roster = Roster(client, self._book, self._expected.drop_row)

    @property
    def num_under_way(self) -> int:
        """Decisions that are not over."""
        return self._book.num_bookings

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        left = self._candidates(request, excluded)
        now = self._now()
        block_size = request.block_size or 1
        asked = RequestView(
            request.num_prompt_tokens,
            block_size,
            request.routing.expected_output_tokens or _OUTPUT_TOKENS,
        )
        field = self._roster.field(left)
        workers = self._look(asked, request, field, now)
        costs = self._policy(asked, workers)
        index = pick(costs, self._rng, self._options.temperature)
        overlap = int(workers.overlap_blocks[index])
        prefill_s = float(workers.prefill_s[index])
        row = int(field.rows[index])
        ticket = self._book.book(
            row,
            asked.prompt_tokens,
            asked.prompt_tokens - overlap * block_size,
            asked.num_blocks + asked.output_tokens / block_size,
            prefill_s,
            now,
        )
        self._expected.send(row, ticket, request.sequence_hashes)
        predicted_s = float(workers.queue_s[index]) + prefill_s
        return Decision(left[index], overlap, predicted_s * 1e3, booking=ticket)

    def begun(self, decision: Decision) -> None:
        self._compute(decision.booking, self._book.begin(decision.booking, self._now()))

    def free(self, decision: Decision) -> None:
        self._compute(decision.booking, self._book.free(decision.booking, self._now()))

    def _compute(self, ticket: int, booking: Booking | None) -> None:
        """Its prompt is computed, or never will be."""
        if booking is not None:
            self._expected.end(booking.row, ticket)

    async def close(self) -> None:
        """What feeds the index is somebody else's."""

    def on_report(self, report: LoadReport) -> None:
        member = self._roster.member(InstanceId(report.instance))
        if member is not None:
            self._book.on_report(member.row, report.load)

    # ---

    def _candidates(self, request: Request, excluded: frozenset[InstanceId]) -> list[Instance]:
        if self._eligible.is_anyone(request, excluded):
            everyone = self._client.candidates()
            if everyone:
                return everyone
        return self._eligible.of(request, excluded)

    def _look(self, asked: RequestView, request: Request, field: Field, now: float) -> WorkersView:
        book, rows, prices = self._book, field.rows, field.prices
        overlap = self._overlap(asked, request, field)
        decoding = book.decoding[rows]
        new_tokens = asked.prompt_tokens - overlap * asked.block_size
        return WorkersView(
            overlap_blocks=overlap,
            prefill_tokens=book.prefill_tokens[rows],
            blocks=book.blocks[rows],
            requests=book.requests[rows],
            decoding=decoding,
            queue_s=np.maximum(book.idle_at[rows] - now, 0.0),
            prefill_s=prices.prefill_s(asked.prompt_tokens, new_tokens),
            slowdown_s=prices.slowdown_s(
                asked.prompt_tokens, asked.output_tokens, decoding, book.context_tokens[rows]
            ),
            total_blocks=prices.total_blocks,
        )

    def _overlap(self, asked: RequestView, request: Request, field: Field) -> Floats:
        """Of each candidate, less the last block where it is all there: an engine computes the last token anyway."""
        overlap = np.zeros(len(field.rows))
        hashes = request.sequence_hashes[: (asked.prompt_tokens - 1) // asked.block_size]
        if hashes:
            overlap = self._expected.find(hashes, field.rows)
            found = self._holders.find(hashes)
            for index, instance in enumerate(field.instances):
                slot = self._holders.slot_of(instance.id)
                if slot is not None and slot < len(found):
                    overlap[index] = max(overlap[index], found[slot])
        return overlap
