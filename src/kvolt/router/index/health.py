"""IndexHealth: detects workers whose index entries disagree with their own reports. Pure.

The first delta of an answer reports how much of its prompt the worker had cached; the index predicted the same when the
request was sent. Occasional differences are normal: blocks are evicted or sealed in between, and prompts are computed
together. A worker with persistent differences is flagged, and cleared after its reports have matched for a while.

    healthy --- mean error above `flag_error` after `min_reports` ---> FLAGGED
    flagged --- mean error below `clear_error` after `min_agreeing` reports and `min_flagged_s` ---> CLEARED

The error of a report is the share of the prompt's blocks on which the two differ, so that long prompts count no more
than short ones; the mean is an exponential average. Reports without any predicted or cached blocks are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from kvolt.core.ids import InstanceId


class IndexHealthOptions(msgspec.Struct, frozen=True, kw_only=True):
    slack_blocks: int = 1
    """Tolerated difference per report: engines count partial and last blocks differently."""
    flag_error: float = 0.5
    clear_error: float = 0.2
    min_reports: int = 16
    min_agreeing: int = 32
    """Reports since the flag; the mean ensures that the latest ones agree."""
    min_flagged_s: float = 10.0
    window: int = 16
    """Averaging window in reports."""


@dataclass(frozen=True, slots=True)
class PredictedBlocks:
    """Blocks of a prompt that were predicted to be cached when it was sent."""

    held: int
    """Held according to the index."""
    expected: int
    """Including pending blocks, which may or may not be computed in time."""


class HealthChange(Enum):
    FLAGGED = auto()
    """The index entries of the worker are not usable; request a snapshot."""
    CLEARED = auto()
    """Index and reports agree again."""


@dataclass(slots=True)
class _Record:
    """Reports of one worker since it was last flagged or cleared."""

    num_reports: int = 0
    error: float = 0.0
    flagged_at: float | None = None


class IndexHealth:
    """See the module. One record per reporting worker until `drop_worker`."""

    def __init__(self, options: IndexHealthOptions | None = None) -> None:
        self._options = options or IndexHealthOptions()
        self._records: dict[InstanceId, _Record] = {}
        self.num_flaggings = 0
        self.num_reports = 0
        """Reports that were judged."""
        self.num_wrong = 0
        """Judged reports with an error above one half."""

    def is_healthy(self, instance_id: InstanceId) -> bool:
        """Whether the worker is not flagged; True without reports."""
        record = self._records.get(instance_id)
        return record is None or record.flagged_at is None

    @property
    def flagged(self) -> list[InstanceId]:
        """Flagged workers in order of id."""
        return sorted(key for key, record in self._records.items() if record.flagged_at is not None)

    def drop_worker(self, instance_id: InstanceId) -> None:
        """Forget a worker. Unknown workers are ignored."""
        self._records.pop(instance_id, None)

    def record_report(
        self, instance_id: InstanceId, predicted: PredictedBlocks, cached_blocks: int, now: float
    ) -> HealthChange | None:
        """Record the cached blocks that a worker reported; return a change of its health, if any."""
        options = self._options
        max_blocks = max(predicted.held, predicted.expected, cached_blocks)
        if max_blocks <= options.slack_blocks:
            return None
        highest = max(predicted.held, predicted.expected)
        missed = max(predicted.held - cached_blocks, cached_blocks - highest, 0)
        error = max(missed - options.slack_blocks, 0) / (max_blocks - options.slack_blocks)
        self.num_reports += 1
        self.num_wrong += error > 0.5
        record = self._records.setdefault(instance_id, _Record())
        record.num_reports += 1
        record.error += (error - record.error) / min(record.num_reports, options.window)
        return self._judge(record, now)

    def _judge(self, record: _Record, now: float) -> HealthChange | None:
        options = self._options
        if record.flagged_at is None:
            if record.num_reports < options.min_reports or record.error <= options.flag_error:
                return None
            record.flagged_at = now
            record.num_reports = 0  # only reports after the snapshot request count
            self.num_flaggings += 1
            return HealthChange.FLAGGED
        has_agreed = record.num_reports >= options.min_agreeing and record.error < options.clear_error
        if not has_agreed or now - record.flagged_at < options.min_flagged_s:
            return None
        record.flagged_at = None
        record.num_reports = 0
        return HealthChange.CLEARED
