"""LoadBook: what this router has sent to each worker and is not over, in arrays over workers. Pure.

Owns the bookings. A worker is a row; rows are reused. Time comes with each call, in seconds.

Prompts are computed one after the other, so of a worker's backlog one figure is kept: `idle_at`, when it would have
computed all that it was sent. A booking moves it by what the prompt will take. The first token of a request shows how
far that was wrong: from then on it takes what those take that are left.

Others send to the same workers, too. Routers tell each other what they have booked (`gossip`); who tells nothing shows
only in what a worker reports beyond our own bookings. Of the two the larger counts, since the one lags behind the other
and is no other requests than the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvolt.core.latency import Floats
from kvolt.core.load import WorkerLoad
from kvolt.router.place import Place
from kvolt.router.service.gossip import PlaceBookings

Rows = npt.NDArray[np.intp]

_FIRST_ROWS = 16
_RATE_S = 10.0
"""Time over which arrivals are averaged."""
_MOST_PREFILL_SHARE = 0.9
"""Beyond, an estimate of what is left for answers says nothing."""
_LEAST_REQUESTS = 0.5
"""Requests come whole; what is less is what sums of floats leave."""


@dataclass(slots=True)
class Booking:
    """One request at one worker."""

    row: int
    prompt_tokens: int
    prefill_tokens: int
    """Of the prompt, what was expected to be computed."""
    blocks: float
    """What it holds or will hold, prompt and answer."""
    prefill_s: float
    has_begun: bool = False

    @property
    def new_blocks(self) -> float:
        """Of those, what it does not find there: the share of its prompt that is computed."""
        return self.blocks * self.prefill_tokens / max(self.prompt_tokens, 1)


def even_out(requests: Floats, tokens: Floats) -> tuple[Floats, Floats]:
    """Requests and tokens at each worker, on average over the life of an answer that begins now.

    Requests that come go where the fewest are. So a worker below the average is soon at it. One that is above gets
    none until those beyond the average have ended: of a life that is the share `1 - average / requests`, during which
    the excess shrinks to nothing.
    """
    return _even_out(requests), _even_out(tokens)


def _even_out(amounts: Floats) -> Floats:
    average = float(amounts.sum()) / len(amounts)
    share = np.maximum(0.5 * (1.0 - average / (amounts + 1.0)), 0.0)
    return average + share * (amounts - average)


class LoadBook:
    """See the module. The arrays are read by row, and changed by nobody else."""

    def __init__(self) -> None:
        self._free_rows: list[int] = []
        self._num_rows = 0
        self._bookings: dict[int, Booking] = {}
        self._num_booked = 0
        self.prefill_tokens = np.zeros(_FIRST_ROWS)
        """Of prompts that are not computed yet."""
        self.blocks = np.zeros(_FIRST_ROWS)
        """Of all requests, ours and others'."""
        self.requests = np.zeros(_FIRST_ROWS)
        self.decoding = np.zeros(_FIRST_ROWS)
        self.context_tokens = np.zeros(_FIRST_ROWS)
        """Of the requests that decode."""
        self.under_way_tokens = np.zeros(_FIRST_ROWS)
        """Prompt tokens of all requests, computed or not."""
        self.shared_blocks = np.zeros(_FIRST_ROWS)
        """Blocks of prompts that another request under way there has too, counted once for each after the first."""
        self._prefill_share = np.zeros(_FIRST_ROWS)
        self._prefilled_at = np.zeros(_FIRST_ROWS)
        self._arrivals_per_s = 0.0
        self._arrived_at = 0.0
        self.used_blocks = np.zeros(_FIRST_ROWS)
        """In use now or soon, by the worker's own word where it has given it: requests that share blocks hold fewer
        together than they do one by one."""
        self._reported_used = np.zeros(_FIRST_ROWS)
        self._has_reported = np.zeros(_FIRST_ROWS)
        self._coming_blocks = np.zeros(_FIRST_ROWS)
        """New ones of prompts that are not computed yet, which are not in a report yet."""
        self.idle_at = np.zeros(_FIRST_ROWS)
        self._pending_s = np.zeros(_FIRST_ROWS)
        self.others_idle_at = np.zeros(_FIRST_ROWS)
        """When it would have computed what the others have told that they sent it."""
        self._others_until = 0.0
        """When all of them would have: mostly nobody has told anything, and nothing is to be looked at."""
        self._told_requests = np.zeros(_FIRST_ROWS)
        self._told_decoding = np.zeros(_FIRST_ROWS)
        self._told_prefill_tokens = np.zeros(_FIRST_ROWS)
        self._told_blocks = np.zeros(_FIRST_ROWS)
        self._told_context_tokens = np.zeros(_FIRST_ROWS)
        self._reported_requests = np.zeros(_FIRST_ROWS)
        self._reported_blocks = np.zeros(_FIRST_ROWS)
        """Beyond our own."""

    @property
    def num_bookings(self) -> int:
        return len(self._bookings)

    # --- rows

    def add_row(self) -> int:
        row = self._free_rows.pop() if self._free_rows else self._num_rows
        if row == self._num_rows:
            self._num_rows += 1
            if row == len(self.blocks):
                for name, array in self._arrays():
                    setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        return row

    def drop_row(self, row: int) -> None:
        """The worker is gone; what was booked there is forgotten, and may still be freed."""
        for ticket in [ticket for ticket, booking in self._bookings.items() if booking.row == row]:
            del self._bookings[ticket]
        for _, array in self._arrays():
            array[row] = 0.0
        self._free_rows.append(row)

    def _arrays(self) -> list[tuple[str, Floats]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray)]

    # --- bookings

    def book(
        self, row: int, prompt_tokens: int, prefill_tokens: int, blocks: float, prefill_s: float, now: float
    ) -> int:
        """A ticket for `begin` and `free`."""
        self.idle_at[row] = max(float(self.idle_at[row]), now) + prefill_s
        self._pending_s[row] += prefill_s
        booking = Booking(row, prompt_tokens, prefill_tokens, blocks, prefill_s)
        self._num_booked += 1
        ticket = self._num_booked
        self._bookings[ticket] = booking
        self.prefill_tokens[row] += prefill_tokens
        self.blocks[row] += blocks
        self.requests[row] += 1
        self.under_way_tokens[row] += prompt_tokens
        fading = math.exp(min(float(self._prefilled_at[row]) - now, 0.0) / _RATE_S)
        self._prefill_share[row] = float(self._prefill_share[row]) * fading + prefill_s / _RATE_S
        self._prefilled_at[row] = now
        self._arrivals_per_s = self.arrivals_per_s(now) + 1.0 / _RATE_S
        self._arrived_at = now
        self._come(row, booking.new_blocks)
        return ticket

    def prefill_share(self, rows: Rows | slice, now: float) -> Floats:
        """Share of each worker's time that prompts took lately: those that decode wait for them."""
        share = self._prefill_share[rows] * np.exp((self._prefilled_at[rows] - now) / _RATE_S)
        return np.minimum(share, _MOST_PREFILL_SHARE)

    def share(self, row: int, num_blocks: int) -> None:
        """So many more blocks of prompts under way there, or fewer, are another request's too."""
        self.shared_blocks[row] += num_blocks

    def arrivals_per_s(self, now: float) -> float:
        """Rate of bookings over the last seconds."""
        return self._arrivals_per_s * math.exp(min(self._arrived_at - now, 0.0) / _RATE_S)

    def begin(self, ticket: int, now: float) -> Booking | None:
        """Its first token has come: the prompt is computed. None for one that is not booked, or has begun."""
        booking = self._bookings.get(ticket)
        if booking is None or booking.has_begun:
            return None
        booking.has_begun = True
        row = booking.row
        self.prefill_tokens[row] -= booking.prefill_tokens
        self._come(row, -booking.new_blocks)
        self.decoding[row] += 1
        self.context_tokens[row] += booking.prompt_tokens
        self.idle_at[row] = now + self._left_s(booking)
        return booking

    def free(self, ticket: int, now: float) -> Booking | None:
        """It is over, however that came. None for one that is not booked."""
        booking = self._bookings.pop(ticket, None)
        if booking is None:
            return None
        row = booking.row
        self.blocks[row] -= booking.blocks
        self.requests[row] -= 1
        self.under_way_tokens[row] -= booking.prompt_tokens
        if booking.has_begun:
            self.decoding[row] -= 1
            self.context_tokens[row] -= booking.prompt_tokens
        else:
            self.prefill_tokens[row] -= booking.prefill_tokens
            self._coming_blocks[row] -= booking.new_blocks
            without_s = max(float(self.idle_at[row]) - booking.prefill_s, now)
            self.idle_at[row] = min(without_s, now + self._left_s(booking))
        self._come(row, 0.0)
        return booking

    def _come(self, row: int, new_blocks: float) -> None:
        """So many more are on their way there; after whatever changes the other figures that are summed up here."""
        self._coming_blocks[row] += new_blocks
        if self.requests[row] < _LEAST_REQUESTS:  # whatever was the last that was heard
            self.used_blocks[row] = 0.0
        elif self._has_reported[row]:
            self.used_blocks[row] = self._reported_used[row] + self._coming_blocks[row]
        else:
            self.used_blocks[row] = self.blocks[row]

    def _left_s(self, booking: Booking) -> float:
        """What the prompts take that are not computed, now that this one is none of them any more."""
        self._pending_s[booking.row] -= booking.prefill_s
        return max(float(self._pending_s[booking.row]), 0.0)

    # --- what others have there

    def queue_s(self, rows: Rows | slice, now: float) -> Floats:
        """Until all prompts are computed that were sent there, ours and others'."""
        left_s: Floats = self.idle_at[rows] - now
        np.maximum(left_s, 0.0, out=left_s)
        if now < self._others_until:
            left_s += np.maximum(self.others_idle_at[rows] - now, 0.0)
        return left_s

    def left_s(self, row: int, now: float) -> float:
        """Until the prompts are computed that we sent there; once that time is over, what they were to take."""
        left_s = float(self.idle_at[row]) - now
        return left_s if left_s > 0.0 else max(float(self._pending_s[row]), 0.0)

    def has_own(self, rows: Rows | slice) -> npt.NDArray[np.bool_]:
        """Where anything is of our own sending."""
        others = np.maximum(self._told_requests[rows], self._reported_requests[rows])
        has: npt.NDArray[np.bool_] = self.requests[rows] - others >= _LEAST_REQUESTS
        return has

    def on_report(self, row: int, load: WorkerLoad) -> None:
        """What a worker is busy with; what is there beyond our own is others'."""
        own_requests = float(self.requests[row]) - self._others_requests(row)
        own_blocks = float(self.blocks[row]) - self._others_blocks(row)
        requests = max(load.running + load.waiting - own_requests, 0.0)
        # Without others' requests it is our own that hold more, or less, than was expected of them.
        blocks = max(load.kv_used_blocks - own_blocks, 0.0) if requests else 0.0
        self._count_others(row, -1.0)
        self._reported_requests[row], self._reported_blocks[row] = requests, blocks
        self._reported_used[row], self._has_reported[row] = load.kv_used_blocks, 1.0
        self._count_others(row, 1.0)

    def set_others(self, row: int, told: PlaceBookings, now: float) -> None:
        """What the other routers have there, by their own word."""
        self._count_others(row, -1.0)
        self._told_requests[row] = told.requests
        self._told_decoding[row] = told.decoding
        self._told_prefill_tokens[row] = told.prefill_tokens
        self._told_blocks[row] = told.blocks
        self._told_context_tokens[row] = told.context_tokens
        self._count_others(row, 1.0)
        self.others_idle_at[row] = now + told.queue_s
        self._others_until = max(self._others_until, now + told.queue_s)

    def own(self, rows: Mapping[Place, int], now: float) -> list[PlaceBookings]:
        """What we have at these places ourselves, where there is anything."""
        at = np.fromiter(rows.values(), dtype=np.intp, count=len(rows))
        others = np.maximum(self._told_requests[at], self._reported_requests[at])
        amounts = (
            self.requests[at] - others,
            self.decoding[at] - (self._told_decoding[at] - self._told_requests[at] + others),
            self.prefill_tokens[at] - self._told_prefill_tokens[at],
            self.blocks[at] - np.maximum(self._told_blocks[at], self._reported_blocks[at]),
            self.context_tokens[at] - self._told_context_tokens[at],
            self.idle_at[at] - now,
        )
        by_place = np.maximum(np.stack(amounts, axis=1), 0.0).tolist()
        return [
            PlaceBookings(*place, *of_place)
            for place, of_place in zip(rows, by_place, strict=True)
            if of_place[0] >= _LEAST_REQUESTS
        ]

    def _count_others(self, row: int, sign: float) -> None:
        self.requests[row] += sign * self._others_requests(row)
        self.decoding[row] += sign * self._others_decoding(row)
        self.prefill_tokens[row] += sign * self._told_prefill_tokens[row]
        self.blocks[row] += sign * self._others_blocks(row)
        self.context_tokens[row] += sign * self._told_context_tokens[row]
        self.under_way_tokens[row] += sign * self._told_context_tokens[row]
        self._come(row, 0.0)

    def _others_requests(self, row: int) -> float:
        return max(float(self._told_requests[row]), float(self._reported_requests[row]))

    def _others_decoding(self, row: int) -> float:
        """Of those that nobody tells of all are taken to decode."""
        return float(self._told_decoding[row] - self._told_requests[row]) + self._others_requests(row)

    def _others_blocks(self, row: int) -> float:
        return max(float(self._told_blocks[row]), float(self._reported_blocks[row]))
