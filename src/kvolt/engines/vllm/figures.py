"""Figures: vLLM's own statistics of requests, which its output processor would keep: we take outputs before it does.

So that `vllm:*` metrics are all there, made by vLLM's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Known:
    stats: Any
    num_prompt_tokens: int
    max_tokens: int | None
    lora: str | None
    is_prefilling: bool = True
    num_cached: int = 0


def _either(tokens: Sequence[int] | None, embeds: Any) -> Any:
    """A prompt has tokens, or vectors in their place."""
    return embeds if tokens is None else tokens


@dataclass(slots=True)
class Figures:
    """See the module."""

    logger: Any = None
    """vLLM's StatLoggerManager, once it runs; None where it keeps no statistics."""
    _known: dict[str, _Known] = field(default_factory=dict)
    _loras: Any = None

    def begin(self, request: Any) -> None:
        """A request as the core gets it."""
        if self.logger is None:
            return
        from vllm.v1.metrics.stats import LoRARequestStates, RequestStateStats

        if self._loras is None:
            self._loras = LoRARequestStates(log_stats=True)
        lora = None if request.lora_request is None else request.lora_request.lora_name
        self._known[request.request_id] = _Known(
            RequestStateStats(arrival_time=request.arrival_time),
            len(_either(request.prompt_token_ids, request.prompt_embeds)),
            request.sampling_params.max_tokens,
            lora,
        )

    def forget(self, engine_ids: list[str]) -> None:
        for each in engine_ids:
            if (known := self._known.pop(each, None)) is not None and self._loras is not None:
                self._loras.request_finished(each, known.lora)

    def step(self, outputs: Any) -> None:
        """All of a step."""
        if self.logger is None:
            return
        from vllm.v1.metrics.stats import IterationStats

        iteration = IterationStats() if outputs.outputs else None
        for output in outputs.outputs:
            known = self._known.get(output.request_id)
            if known is not None and iteration is not None:
                self._add(iteration, output, known, outputs.timestamp)
        if self._loras is not None:
            self._loras.update_scheduler_stats(outputs.scheduler_stats)
        self.logger.record(outputs.scheduler_stats, iteration, engine_idx=outputs.engine_index)

    def _add(self, iteration: Any, output: Any, known: _Known, timestamp: float) -> None:
        if output.prefill_stats is not None:
            known.num_cached = output.prefill_stats.num_cached_tokens
        iteration.update_from_output(
            output, timestamp, known.is_prefilling, known.stats, self._loras, known.lora
        )
        if output.new_token_ids:
            known.is_prefilling = False
        if output.finish_reason is not None:
            iteration.update_from_finished_request(
                finish_reason=output.finish_reason,
                request_id=output.request_id,
                num_prompt_tokens=known.num_prompt_tokens,
                max_tokens_param=known.max_tokens,
                req_stats=known.stats,
                num_cached_tokens=known.num_cached,
            )
            self.forget([output.request_id])
