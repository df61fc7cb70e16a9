"""LoadBook: what this router has sent to each worker and is not over, in arrays over workers. Pure.

Owns the bookings. A worker is a row; rows are reused. Time comes with each call, in seconds.

Prompts are computed one after the other, so of a worker's backlog one figure is kept: `idle_at`, when it would have
computed all that it was sent. A booking moves it by what the prompt will take. The first token of a request shows how
far that was wrong: from then on it takes what those take that are left.

Others send to the same workers, too. What a worker reports beyond our own bookings is kept as theirs until its next
report.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvolt.core.latency import Floats
from kvolt.core.load import WorkerLoad

Rows = npt.NDArray[np.intp]

_FIRST_ROWS = 16


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
        self.idle_at = np.zeros(_FIRST_ROWS)
        self._pending_s = np.zeros(_FIRST_ROWS)
        self._foreign_requests = np.zeros(_FIRST_ROWS)
        self._foreign_blocks = np.zeros(_FIRST_ROWS)

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
        return ticket

    def begin(self, ticket: int, now: float) -> Booking | None:
        """Its first token has come: the prompt is computed. None for one that is not booked, or has begun."""
        booking = self._bookings.get(ticket)
        if booking is None or booking.has_begun:
            return None
        booking.has_begun = True
        row = booking.row
        self.prefill_tokens[row] -= booking.prefill_tokens
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
        if booking.has_begun:
            self.decoding[row] -= 1
            self.context_tokens[row] -= booking.prompt_tokens
        else:
            self.prefill_tokens[row] -= booking.prefill_tokens
            without_s = max(float(self.idle_at[row]) - booking.prefill_s, now)
            self.idle_at[row] = min(without_s, now + self._left_s(booking))
        return booking

    def _left_s(self, booking: Booking) -> float:
        """What the prompts take that are not computed, now that this one is none of them any more."""
        self._pending_s[booking.row] -= booking.prefill_s
        return max(float(self._pending_s[booking.row]), 0.0)

    # --- what workers say

    def on_report(self, row: int, load: WorkerLoad) -> None:
        """What is there beyond our own is others'."""
        own_requests = float(self.requests[row] - self._foreign_requests[row])
        own_blocks = float(self.blocks[row] - self._foreign_blocks[row])
        requests = max(load.running + load.waiting - own_requests, 0.0)
        # Without others' requests it is our own that hold more, or less, than was expected of them.
        blocks = max(load.kv_used_blocks - own_blocks, 0.0) if requests else 0.0
        self.requests[row] += requests - self._foreign_requests[row]
        self.decoding[row] += requests - self._foreign_requests[row]
        self.blocks[row] += blocks - self._foreign_blocks[row]
        self._foreign_requests[row], self._foreign_blocks[row] = requests, blocks
