"""Runs in SGLang's scheduler processes: a step's KV events leave before its tokens, and tokens say which those were.

By itself SGLang publishes them with its statistics: when it is idle, at the next prompt, or after 40 steps. A router
would not know of a prompt's blocks while its answer is made, and nobody could say which of two came first.
"""

from __future__ import annotations

from typing import Any

_RANK_BITS = 40
"""A mark is one number: SGLang's sockets carry numbers as they are."""

_publishers: list[Any] = []
"""Of this process: one, in the scheduler of a rank's first part."""
_num_published = 0
_num_told = 0


def mark_of(rank: int, number: int) -> int:
    return rank << _RANK_BITS | number


def read_mark(mark: int) -> tuple[int, int]:
    """The rank, and how many batches of events it has published."""
    return mark >> _RANK_BITS, mark & ((1 << _RANK_BITS) - 1)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """In place of SGLang's `run_scheduler_process`; for `multiprocessing`, which finds it by its name."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    _order_events()
    run_scheduler_process(*args, **kwargs)


def _order_events() -> None:
    from sglang.srt.disaggregation.kv_events import ZmqEventPublisher, select_kv_publisher_dp_rank
    from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.runtime_context import get_parallel

    begin, publish = SchedulerKvEventsPublisher.__post_init__, ZmqEventPublisher.publish
    stream_output = SchedulerOutputStreamer.stream_output

    def begin_known(self: Any) -> None:
        begin(self)
        if self.enable_kv_cache_events:
            _publishers.append(self)

    def publish_counted(self: Any, events: Any) -> None:
        global _num_published  # noqa: PLW0603 - there is one publisher in a process
        publish(self, events)
        _num_published += 1

    def stream_marked(self: Any, *args: Any, **kwargs: Any) -> None:
        global _num_told  # noqa: PLW0603
        for publisher in _publishers:
            publisher.publish_kv_events()
        if _num_told < _num_published:
            _num_told = _num_published
            own = get_parallel()
            rank = select_kv_publisher_dp_rank(own.attn_dp_size, own.attn_dp_rank, own.dp_rank)
            self.send_to_detokenizer.send_output(mark_of(rank, _num_told))
        stream_output(self, *args, **kwargs)

    SchedulerKvEventsPublisher.__post_init__ = begin_known
    ZmqEventPublisher.publish = publish_counted
    SchedulerOutputStreamer.stream_output = stream_marked
