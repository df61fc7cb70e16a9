"""What TensorRT-LLM has to say besides its answers (KV events, figures): it keeps them until somebody asks.

Asked on the event loop, without waiting. With its RPC executor the question is a call to another process that the loop
waits for, so it is asked seldom (`poll_s`), and whenever an answer has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvolt.core.kv_events import KvChange
from kvolt.engines.kv_formats.trtllm_translator import KvTranslator
from kvolt.engines.trtllm.outputs import IterationStats, stats_of


async def drained(ask: Callable[..., Any]) -> list[Any]:
    """All that is there. Its queue ends by one of three exceptions, which one hangs on the version."""
    found: list[Any] = []
    try:
        async for each in ask(timeout=0):
            found += each if isinstance(each, list) else (each,)
    except (asyncio.QueueEmpty, IndexError, TimeoutError):
        pass
    return found


class Poll:
    """Of one LLM. A translator only where its events are wanted."""

    def __init__(self, llm: Any, translator: KvTranslator | None) -> None:
        self._llm = llm
        self.translator = translator
        self.stats: IterationStats | None = None
        """Of the latest iteration that it has told of."""
        self.num_told = 0
        """Events and figures, ever."""

    async def ask(self) -> tuple[KvChange, ...]:
        """What changed since the last time, in order."""
        told = await drained(self._llm.get_stats_async)
        for each in reversed(told):
            stats = stats_of(each)
            if stats is not None:
                self.stats = stats
                break
        self.num_told += len(told)
        if self.translator is None:
            return ()
        events = await drained(self._llm.get_kv_cache_events_async)
        self.num_told += len(events)
        return tuple(change for event in events for change in self.translator.read(event))
