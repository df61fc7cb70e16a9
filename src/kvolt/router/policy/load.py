"""WorkerLoads: load of each worker from this router's reservations, other replicas and worker reports. Pure.

Arrays over workers; a worker is a row, and rows are reused. Time is an argument, in seconds.

A worker computes prompts one after the other, so its backlog is one number: `idle_at`, when it will have computed all
prompts sent to it. A reservation moves it by the predicted prefill time. The first token of a request corrects it: from
then on the remaining prompts count with their predicted times.

Other senders use the same workers. Router replicas gossip their reservations; others are visible only in worker reports
beyond this router's own reservations. Of these two the larger counts: they overlap, and each lags behind differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvolt.core.load import WorkerLoad
from kvolt.router.policy.cost_model import Floats
from kvolt.router.worker_rank import ReservedLoad, WorkerDpRank

Rows = npt.NDArray[np.intp]

_FIRST_ROWS = 16
_RATE_S = 10.0
"""Averaging time of arrivals."""
_MAX_PREFILL_SHARE = 0.9
"""Upper bound of the prefill share; beyond it the estimate is meaningless."""
_MIN_REQUESTS = 0.5
"""Threshold of a whole request; smaller values are rounding errors of float sums."""


@dataclass(slots=True)
class LoadReservation:
    """One request at one worker."""

    row: int
    prompt_tokens: int
    prefill_tokens: int
    """Prompt tokens expected to be computed."""
    blocks: float
    """Blocks that it holds or will hold: prompt and answer."""
    prefill_s: float
    has_first_token: bool = False

    @property
    def new_blocks(self) -> float:
        """Blocks to be allocated: the computed share of the prompt."""
        return self.blocks * self.prefill_tokens / max(self.prompt_tokens, 1)


def projected_load(requests: Floats, tokens: Floats) -> tuple[Floats, Floats]:
    """Average requests and tokens at each worker over the life of an answer that starts now.

    New requests go to the least loaded workers, so a worker below the average soon reaches it. A worker above gets none
    until its excess has ended: for the share `1 - average / requests` of the answer, during which the excess shrinks to
    zero.
    """
    return _projected(requests), _projected(tokens)


def _projected(amounts: Floats) -> Floats:
    average = float(amounts.sum()) / len(amounts)
    share = np.maximum(0.5 * (1.0 - average / (amounts + 1.0)), 0.0)
    return average + share * (amounts - average)


class WorkerLoads:
    """See the module. Others read the arrays by row and do not modify them."""

    def __init__(self) -> None:
        self._free_rows: list[int] = []
        self._num_rows = 0
        self._reservations: dict[int, LoadReservation] = {}
        self._num_reserved = 0
        self.prefill_tokens = np.zeros(_FIRST_ROWS)
        """Prompt tokens not computed yet."""
        self.blocks = np.zeros(_FIRST_ROWS)
        """Blocks of all requests, of this router and others."""
        self.requests = np.zeros(_FIRST_ROWS)
        self.decoding = np.zeros(_FIRST_ROWS)
        self.context_tokens = np.zeros(_FIRST_ROWS)
        """Prompt tokens of the decoding requests."""
        self.in_flight_tokens = np.zeros(_FIRST_ROWS)
        """Prompt tokens of all requests, computed or not."""
        self.shared_blocks = np.zeros(_FIRST_ROWS)
        """Prompt blocks shared with another request in flight at the worker, counted once per request after
        the first."""
        self._prefill_share = np.zeros(_FIRST_ROWS)
        self._prefilled_at = np.zeros(_FIRST_ROWS)
        self._arrivals_per_s = 0.0
        self._arrived_at = 0.0
        self.used_blocks = np.zeros(_FIRST_ROWS)
        """Blocks in use now or soon; from the worker's report if there is one, since requests that share
        blocks hold fewer than their sum."""
        self._reported_used = np.zeros(_FIRST_ROWS)
        self._has_reported = np.zeros(_FIRST_ROWS)
        self._incoming_blocks = np.zeros(_FIRST_ROWS)
        """Blocks to be allocated for prompts not computed yet, which reports do not contain."""
        self.idle_at = np.zeros(_FIRST_ROWS)
        self._pending_s = np.zeros(_FIRST_ROWS)
        self.replicas_idle_at = np.zeros(_FIRST_ROWS)
        """When the worker will have computed the prompts of other replicas."""
        self._replicas_until = 0.0
        """Latest of `replicas_idle_at`; usually in the past, so that the array is not read."""
        self._replica_requests = np.zeros(_FIRST_ROWS)
        self._replica_decoding = np.zeros(_FIRST_ROWS)
        self._replica_prefill_tokens = np.zeros(_FIRST_ROWS)
        self._replica_blocks = np.zeros(_FIRST_ROWS)
        self._replica_context_tokens = np.zeros(_FIRST_ROWS)
        self._reported_requests = np.zeros(_FIRST_ROWS)
        self._reported_blocks = np.zeros(_FIRST_ROWS)
        """Reported load beyond this router's own."""

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

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
        """Remove a worker. Its reservations are dropped and may still be released."""
        for reservation_id in [
            reservation_id
            for reservation_id, reservation in self._reservations.items()
            if reservation.row == row
        ]:
            del self._reservations[reservation_id]
        for _, array in self._arrays():
            array[row] = 0.0
        self._free_rows.append(row)

    def _arrays(self) -> list[tuple[str, Floats]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray)]

    # --- reservations

    def reserve(
        self,
        row: int,
        prompt_tokens: int,
        prefill_tokens: int,
        blocks: float,
        prefill_s: float,
        now: float,
        step_s: float = 0.0,
    ) -> int:
        """Add a request to a worker; return its reservation id.

        `step_s` is the time of a decode step. Among decoding requests a prompt waits for half a step on average until
        its own first one begins, and the last one takes about half a step longer than the share in `prefill_s`.
        """
        starts_at = now + step_s if self.decoding[row] >= _MIN_REQUESTS else now
        self.idle_at[row] = max(float(self.idle_at[row]), starts_at) + prefill_s
        self._pending_s[row] += prefill_s
        reservation = LoadReservation(row, prompt_tokens, prefill_tokens, blocks, prefill_s)
        self._num_reserved += 1
        reservation_id = self._num_reserved
        self._reservations[reservation_id] = reservation
        self.prefill_tokens[row] += prefill_tokens
        self.blocks[row] += blocks
        self.requests[row] += 1
        self.in_flight_tokens[row] += prompt_tokens
        decay = math.exp(min(float(self._prefilled_at[row]) - now, 0.0) / _RATE_S)
        self._prefill_share[row] = float(self._prefill_share[row]) * decay + prefill_s / _RATE_S
        self._prefilled_at[row] = now
        self._arrivals_per_s = self.arrivals_per_s(now) + 1.0 / _RATE_S
        self._arrived_at = now
        self._add_incoming_blocks(row, reservation.new_blocks)
        return reservation_id

    def prefill_share(self, rows: Rows | slice, now: float) -> Floats:
        """Recent share of each worker's time spent on prompts, which delays decoding."""
        share = self._prefill_share[rows] * np.exp((self._prefilled_at[rows] - now) / _RATE_S)
        return np.minimum(share, _MAX_PREFILL_SHARE)

    def add_shared_blocks(self, row: int, num_blocks: int) -> None:
        """Add to the number of shared prompt blocks at a worker; may be negative."""
        self.shared_blocks[row] += num_blocks

    def arrivals_per_s(self, now: float) -> float:
        """Recent rate of reservations."""
        return self._arrivals_per_s * math.exp(min(self._arrived_at - now, 0.0) / _RATE_S)

    def mark_first_token(self, reservation_id: int, now: float) -> LoadReservation | None:
        """Record a first token: the prompt is computed. None if unknown or already recorded."""
        reservation = self._reservations.get(reservation_id)
        if reservation is None or reservation.has_first_token:
            return None
        reservation.has_first_token = True
        row = reservation.row
        self.prefill_tokens[row] -= reservation.prefill_tokens
        self._add_incoming_blocks(row, -reservation.new_blocks)
        self.decoding[row] += 1
        self.context_tokens[row] += reservation.prompt_tokens
        self.idle_at[row] = now + self._end_pending_prefill(reservation)
        return reservation

    def release(self, reservation_id: int, now: float) -> LoadReservation | None:
        """End a reservation. None if unknown."""
        reservation = self._reservations.pop(reservation_id, None)
        if reservation is None:
            return None
        row = reservation.row
        self.blocks[row] -= reservation.blocks
        self.requests[row] -= 1
        self.in_flight_tokens[row] -= reservation.prompt_tokens
        if reservation.has_first_token:
            self.decoding[row] -= 1
            self.context_tokens[row] -= reservation.prompt_tokens
        else:
            self.prefill_tokens[row] -= reservation.prefill_tokens
            self._incoming_blocks[row] -= reservation.new_blocks
            without_s = max(float(self.idle_at[row]) - reservation.prefill_s, now)
            self.idle_at[row] = min(without_s, now + self._end_pending_prefill(reservation))
        self._add_incoming_blocks(row, 0.0)
        return reservation

    def _add_incoming_blocks(self, row: int, new_blocks: float) -> None:
        """Add blocks to be allocated and update `used_blocks`. Call after the other amounts of the row have changed."""
        self._incoming_blocks[row] += new_blocks
        if self.requests[row] < _MIN_REQUESTS:  # whatever the last report was
            self.used_blocks[row] = 0.0
        elif self._has_reported[row]:
            self.used_blocks[row] = self._reported_used[row] + self._incoming_blocks[row]
        else:
            self.used_blocks[row] = self.blocks[row]

    def _end_pending_prefill(self, reservation: LoadReservation) -> float:
        """Predicted prefill time of the remaining prompts, without this one."""
        self._pending_s[reservation.row] -= reservation.prefill_s
        return max(float(self._pending_s[reservation.row]), 0.0)

    # --- load of other senders

    def queue_s(self, rows: Rows | slice, now: float) -> Floats:
        """Predicted time until all prompts at the worker are computed, of this router and other replicas."""
        queue_s: Floats = self.idle_at[rows] - now
        np.maximum(queue_s, 0.0, out=queue_s)
        if now < self._replicas_until:
            queue_s += np.maximum(self.replicas_idle_at[rows] - now, 0.0)
        return queue_s

    def own_queue_s(self, row: int, now: float) -> float:
        """The same for this router's prompts; once that time has passed, their predicted duration."""
        queue_s = float(self.idle_at[row]) - now
        return queue_s if queue_s > 0.0 else max(float(self._pending_s[row]), 0.0)

    def has_own_requests(self, rows: Rows | slice) -> npt.NDArray[np.bool_]:
        """Whether this router has requests at the worker."""
        external = np.maximum(self._replica_requests[rows], self._reported_requests[rows])
        has_own: npt.NDArray[np.bool_] = self.requests[rows] - external >= _MIN_REQUESTS
        return has_own

    def on_report(self, row: int, load: WorkerLoad) -> None:
        """Apply a worker's report; load beyond this router's own is external."""
        own_requests = float(self.requests[row]) - self._external_requests(row)
        own_blocks = float(self.blocks[row]) - self._external_blocks(row)
        requests = max(load.running + load.waiting - own_requests, 0.0)
        # Without external requests a difference is an error of the own estimates.
        blocks = max(load.kv_used_blocks - own_blocks, 0.0) if requests else 0.0
        self._add_external_load(row, -1.0)
        self._reported_requests[row], self._reported_blocks[row] = requests, blocks
        self._reported_used[row], self._has_reported[row] = load.kv_used_blocks, 1.0
        self._add_external_load(row, 1.0)

    def set_replica_load(self, row: int, load: ReservedLoad, now: float) -> None:
        """Set the load reserved by the other replicas."""
        self._add_external_load(row, -1.0)
        self._replica_requests[row] = load.requests
        self._replica_decoding[row] = load.decoding
        self._replica_prefill_tokens[row] = load.prefill_tokens
        self._replica_blocks[row] = load.blocks
        self._replica_context_tokens[row] = load.context_tokens
        self._add_external_load(row, 1.0)
        self.replicas_idle_at[row] = now + load.queue_s
        self._replicas_until = max(self._replicas_until, now + load.queue_s)

    def own_loads(self, rows: Mapping[WorkerDpRank, int], now: float) -> list[ReservedLoad]:
        """This router's own reservations by worker rank, where there are any."""
        index = np.fromiter(rows.values(), dtype=np.intp, count=len(rows))
        external = np.maximum(self._replica_requests[index], self._reported_requests[index])
        amounts = (
            self.requests[index] - external,
            self.decoding[index] - (self._replica_decoding[index] - self._replica_requests[index] + external),
            self.prefill_tokens[index] - self._replica_prefill_tokens[index],
            self.blocks[index] - np.maximum(self._replica_blocks[index], self._reported_blocks[index]),
            self.context_tokens[index] - self._replica_context_tokens[index],
            self.idle_at[index] - now,
        )
        by_worker_rank = np.maximum(np.stack(amounts, axis=1), 0.0).tolist()
        return [
            ReservedLoad(*worker_rank, *row_amounts)
            for worker_rank, row_amounts in zip(rows, by_worker_rank, strict=True)
            if row_amounts[0] >= _MIN_REQUESTS
        ]

    def _add_external_load(self, row: int, sign: float) -> None:
        self.requests[row] += sign * self._external_requests(row)
        self.decoding[row] += sign * self._external_decoding(row)
        self.prefill_tokens[row] += sign * self._replica_prefill_tokens[row]
        self.blocks[row] += sign * self._external_blocks(row)
        self.context_tokens[row] += sign * self._replica_context_tokens[row]
        self.in_flight_tokens[row] += sign * self._replica_context_tokens[row]
        self._add_incoming_blocks(row, 0.0)

    def _external_requests(self, row: int) -> float:
        return max(float(self._replica_requests[row]), float(self._reported_requests[row]))

    def _external_decoding(self, row: int) -> float:
        """Requests of unknown senders count as decoding."""
        return float(self._replica_decoding[row] - self._replica_requests[row]) + self._external_requests(row)

    def _external_blocks(self, row: int) -> float:
        return max(float(self._replica_blocks[row]), float(self._reported_blocks[row]))
