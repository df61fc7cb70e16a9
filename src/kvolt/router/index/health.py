"""TrustBook: whether the index is right about each worker, by what the worker reports. Pure: reports in, changes out.

An answer's first delta says how much of its prompt the worker had. The index said so, too, when the request was sent.
They differ now and then: blocks are evicted or sealed in between, and a prompt may be computed together with the one
that it was to follow. They must not differ persistently. A worker of which the index is wrong for a good part of what
it says, over a number of reports, is flagged; it is trusted again when they have agreed for a while.

    trusted --- mean error above `flag_error`, of `min_reports` or more ---> FLAGGED
    flagged --- mean error below `clear_error`, of `min_agreeing` or more, `min_flagged_s` later ---> CLEARED

The mean is over the share of each prompt's blocks that one had and the other did not, the latest reports first: a huge
prompt counts no more than a small one. Reports of prompts of which nobody had anything say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from kvolt.core.ids import InstanceId


class TrustOptions(msgspec.Struct, frozen=True, kw_only=True):
    slack_blocks: int = 1
    """By which a report may always differ: where a block ends, and the last one, engines count differently."""
    flag_error: float = 0.5
    clear_error: float = 0.2
    min_reports: int = 16
    min_agreeing: int = 32
    """Reports since it was flagged; the mean sees to it that the latest agree."""
    min_flagged_s: float = 10.0
    memory: int = 16
    """Reports that count: one more than so many ago has lost most of its weight."""


@dataclass(frozen=True, slots=True)
class Promise:
    """How many blocks of a prompt a worker was said to have when it was sent there."""

    held: int
    """By the index."""
    expected: int
    """With those of prompts that were on their way there: they may be computed by then, or not."""


class TrustChange(Enum):
    FLAGGED = auto()
    """From now on the index is not to be believed about it; it should be asked for all that it holds."""
    CLEARED = auto()
    """They agree again."""


@dataclass(slots=True)
class _Record:
    """Of one worker, since it was last flagged or cleared."""

    num_reports: int = 0
    error: float = 0.0
    flagged_at: float | None = None


class TrustBook:
    """See the module. As many records as there are workers that reported and are not dropped."""

    def __init__(self, options: TrustOptions | None = None) -> None:
        self._options = options or TrustOptions()
        self._records: dict[InstanceId, _Record] = {}
        self.num_flaggings = 0
        self.num_reports = 0
        """That said something."""
        self.num_wrong = 0
        """Of those, by more than half."""

    def is_trusted(self, instance_id: InstanceId) -> bool:
        """Also who has reported nothing."""
        record = self._records.get(instance_id)
        return record is None or record.flagged_at is None

    @property
    def flagged(self) -> list[InstanceId]:
        """In order of id."""
        return sorted(key for key, record in self._records.items() if record.flagged_at is not None)

    def error_of(self, instance_id: InstanceId) -> float:
        """0 where all that was said was right, 1 where nothing was."""
        record = self._records.get(instance_id)
        return 0.0 if record is None else record.error

    def drop(self, instance_id: InstanceId) -> None:
        """The worker is gone. Not an error for one that is not here."""
        self._records.pop(instance_id, None)

    def report(
        self, instance_id: InstanceId, promise: Promise, cached_blocks: int, now: float
    ) -> TrustChange | None:
        """A worker had so many blocks of a prompt; what that changes."""
        options = self._options
        most = max(promise.held, promise.expected, cached_blocks)
        if most <= options.slack_blocks:
            return None
        highest = max(promise.held, promise.expected)
        missed = max(promise.held - cached_blocks, cached_blocks - highest, 0)
        error = max(missed - options.slack_blocks, 0) / (most - options.slack_blocks)
        self.num_reports += 1
        self.num_wrong += error > 0.5
        record = self._records.setdefault(instance_id, _Record())
        record.num_reports += 1
        record.error += (error - record.error) / min(record.num_reports, options.memory)
        return self._judge(record, now)

    def _judge(self, record: _Record, now: float) -> TrustChange | None:
        options = self._options
        if record.flagged_at is None:
            if record.num_reports < options.min_reports or record.error <= options.flag_error:
                return None
            record.flagged_at = now
            record.num_reports = 0  # what is said of it after it was asked is what counts
            self.num_flaggings += 1
            return TrustChange.FLAGGED
        has_agreed = record.num_reports >= options.min_agreeing and record.error < options.clear_error
        if not has_agreed or now - record.flagged_at < options.min_flagged_s:
            return None
        record.flagged_at = None
        record.num_reports = 0
        return TrustChange.CLEARED
