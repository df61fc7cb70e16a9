"""Polls TensorRT-LLM's KV events and statistics.

Runs on the event loop without waiting. With its RPC executor a poll is a blocking call to another process, so it is
done only every `poll_s` and after a finished answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvolt.core.kv_events import KvChange
from kvolt.engines.kv_formats.trtllm_translator import TrtllmTranslator
from kvolt.engines.trtllm.outputs import IterationStats, stats_of


async def drain(read: Callable[..., Any]) -> list[Any]:
    """Read all queued items. Depending on the version the end of the queue is one of three exceptions."""
    items: list[Any] = []
    try:
        async for each in read(timeout=0):
            items += each if isinstance(each, list) else (each,)
    except (asyncio.QueueEmpty, IndexError, TimeoutError):
        pass
    return items


class Poll:
    """Poll of one LLM; events only with a translator."""

    def __init__(self, llm: Any, translator: TrtllmTranslator | None) -> None:
        self._llm = llm
        self.translator = translator
        self.stats: IterationStats | None = None
        """Statistics of the latest reported iteration."""
        self.num_reports = 0
        """Events and statistics received so far."""

    async def read(self) -> tuple[KvChange, ...]:
        """KV changes since the last call, in order."""
        reports = await drain(self._llm.get_stats_async)
        for each in reversed(reports):
            stats = stats_of(each)
            if stats is not None:
                self.stats = stats
                break
        self.num_reports += len(reports)
        if self.translator is None:
            return ()
        events = await drain(self._llm.get_kv_cache_events_async)
        self.num_reports += len(events)
        return tuple(change for event in events for change in self.translator.translate(event))
