"""State of a running TensorRT-LLM: queue, sequences, prefills and polling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.errors import EngineFailed
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import KvChange
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, StopConditions
from kvolt.engines.external.answers import Choice
from kvolt.engines.kv_formats.trtllm_seeds import SequenceSeeds
from kvolt.engines.kv_formats.trtllm_translator import TrtllmTranslator
from kvolt.engines.trtllm.admission import Admission
from kvolt.engines.trtllm.arguments import TrtllmArguments
from kvolt.engines.trtllm.launch import Launched
from kvolt.engines.trtllm.outputs import IterationStats, stats_of
from kvolt.engines.trtllm.prefills import Prefills
from kvolt.engines.trtllm.requests import sampling_params
from kvolt.engines.trtllm.sequences import Adapters, OnFailure, OnOutput, Sequences
from kvolt.runtime.tasks import TaskGroup
from kvolt.scheduler.step_plan import Limits

log = logging.getLogger(__name__)

_FIRST_STATS_S = 10.0
"""Timeout of the first statistics after the first answer."""


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
    """Polls KV events and statistics of one LLM; events only with a translator.

    Runs on the event loop without waiting. With TensorRT-LLM's RPC executor a poll is a blocking call to another
    process, so it is done only every `poll_s` and after a finished answer.
    """

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


@dataclass(slots=True)
class Running:
    """See the module."""

    launched: Launched
    adapters: Adapters
    admission: Admission
    sequences: Sequences
    prefills: Prefills
    poll: Poll

    @classmethod
    def of(
        cls,
        launched: Launched,
        arguments: TrtllmArguments,
        task_group: TaskGroup,
        on_output: OnOutput,
        on_failure: OnFailure,
    ) -> Self:
        info, adapters = launched.info, Adapters()
        seeds = SequenceSeeds(info.block_size)
        admission = Admission(info.capacity.max_num_seqs, info.capacity.kv_total_blocks)
        sequences = Sequences(launched, adapters, admission, seeds, task_group, on_output, on_failure)
        eos_token_ids = frozenset(launched.card.eos_token_ids)
        prefills = Prefills(task_group, sequences, arguments.hold_s, arguments.seeds, eos_token_ids)
        translator = TrtllmTranslator(info.block_size, seeds) if arguments.kv_events else None
        return cls(launched, adapters, admission, sequences, prefills, Poll(launched.llm, translator))

    async def warm_up(self, poll_s: float) -> tuple[KvChange, ...]:
        """Generate one token: verifies that it works and reveals its number of blocks. Events and statistics cannot be
        polled before the first request. EngineFailed."""
        launched = self.launched
        request = Request(
            request_id=RequestId("warm-up"),
            model=launched.info.model,
            token_ids=(launched.card.bos_token_id or 0,),
            stop=StopConditions(max_tokens=1, ignore_eos=True),
        )
        changes: tuple[KvChange, ...] = ()
        try:
            params = sampling_params(Choice(request, 0, "warm-up"), launched.card.eos_token_ids, max_tokens=1)
            await launched.llm.generate_async(list(request.token_ids), sampling_params=params)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_STATS_S):
                    while not self._read_capacity():
                        changes += await self.poll.read()
                        await asyncio.sleep(poll_s)
        except Exception as error:
            raise EngineFailed(f"TensorRT-LLM cannot answer: {error}", engine="trtllm") from error
        if not launched.info.capacity.kv_total_blocks:
            log.warning("number of KV blocks unknown: prompts are not queued by blocks")
        return changes

    def _read_capacity(self) -> bool:
        stats = self.poll.stats
        if stats is None or stats.kv_cache_stats is None or not stats.kv_cache_stats.max_num_blocks:
            return False
        self.launched.set_capacity(stats.kv_cache_stats.max_num_blocks, stats.max_num_active_requests)
        capacity = self.launched.info.capacity
        self.admission.total_blocks = capacity.kv_total_blocks
        self.admission.max_running = capacity.max_num_seqs
        return True

    @property
    def card(self) -> ModelCard:
        return self.launched.card

    @property
    def info(self) -> EngineInfo:
        return self.launched.info

    @property
    def limits(self) -> Limits:
        return self.launched.limits

    @property
    def vocab_size(self) -> int | None:
        return self.launched.vocab_size

    @property
    def num_outputs(self) -> int:
        """Outputs, events and statistics received so far."""
        return self.sequences.num_outputs + self.poll.num_reports

    @property
    def is_busy(self) -> bool:
        return self.admission.num_running > 0

    def load(self) -> WorkerLoad:
        """Current load. TensorRT-LLM's statistics are of its last iteration and are ignored when idle."""
        admission, stats = self.admission, self.poll.stats
        used = admission.num_held_blocks
        if admission.num_running:
            used = admission.num_blocks
            if stats is not None and stats.kv_cache_stats is not None:
                used = max(stats.kv_cache_stats.used_num_blocks, admission.num_held_blocks)
        return WorkerLoad(
            running=admission.num_running,
            waiting=admission.num_waiting,
            kv_used_blocks=used,
            kv_total_blocks=self.launched.info.capacity.kv_total_blocks,
        )
