"""Runs in SGLang's scheduler processes: publishes a step's KV events before its tokens, and sends their number along.

SGLang itself publishes events with its statistics: when idle, at the next prompt, or after 40 steps. Routers would not
know a prompt's blocks while its answer is generated, and the order of events and tokens would be unknown.
"""

from __future__ import annotations

from typing import Any

_RANK_BITS = 40
"""Rank and number are packed into one integer, which SGLang's sockets can carry."""

_publishers: list[Any] = []
"""Publisher of this process; only the first scheduler of a rank has one."""
_num_published = 0
_num_announced = 0


def mark_of(rank: int, number: int) -> int:
    return rank << _RANK_BITS | number


def read_mark(mark: int) -> tuple[int, int]:
    """The rank and its number of published batches."""
    return mark >> _RANK_BITS, mark & ((1 << _RANK_BITS) - 1)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Replaces SGLang's `run_scheduler_process`. Module-level, since `multiprocessing` imports it by name."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    _patch_event_order()
    run_scheduler_process(*args, **kwargs)


def _patch_event_order() -> None:
    from sglang.srt.disaggregation.kv_events import ZmqEventPublisher, select_kv_publisher_dp_rank
    from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.runtime_context import get_parallel

    post_init, publish = SchedulerKvEventsPublisher.__post_init__, ZmqEventPublisher.publish
    stream_output = SchedulerOutputStreamer.stream_output

    def post_init_and_register(self: Any) -> None:
        post_init(self)
        if self.enable_kv_cache_events:
            _publishers.append(self)

    def publish_and_count(self: Any, events: Any) -> None:
        global _num_published  # noqa: PLW0603 - there is one publisher in a process
        publish(self, events)
        _num_published += 1

    def stream_after_events(self: Any, *args: Any, **kwargs: Any) -> None:
        global _num_announced  # noqa: PLW0603
        for publisher in _publishers:
            publisher.publish_kv_events()
        if _num_announced < _num_published:
            _num_announced = _num_published
            own = get_parallel()
            rank = select_kv_publisher_dp_rank(own.attn_dp_size, own.attn_dp_rank, own.dp_rank)
            self.send_to_detokenizer.send_output(mark_of(rank, _num_announced))
        stream_output(self, *args, **kwargs)

    SchedulerKvEventsPublisher.__post_init__ = post_init_and_register
    ZmqEventPublisher.publish = publish_and_count
    SchedulerOutputStreamer.stream_output = stream_after_events
