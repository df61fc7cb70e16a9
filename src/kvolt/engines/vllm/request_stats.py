"""vLLM's request statistics, so that all `vllm:*` metrics exist.

vLLM updates them in its output processor, which this adapter bypasses. Uses vLLM's own classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _RequestState:
    stats: Any
    num_prompt_tokens: int
    max_tokens: int | None
    lora: str | None
    is_prefilling: bool = True
    num_cached: int = 0


def _prompt(tokens: Sequence[int] | None, embeds: Any) -> Any:
    """Tokens or embeddings."""
    return embeds if tokens is None else tokens


@dataclass(slots=True)
class RequestStats:
    """See the module."""

    logger: Any = None
    """vLLM's StatLoggerManager; None if statistics are disabled."""
    _requests: dict[str, _RequestState] = field(default_factory=dict)
    _loras: Any = None

    def add(self, request: Any) -> None:
        """Add a request of the engine core."""
        if self.logger is None:
            return
        from vllm.v1.metrics.stats import LoRARequestStates, RequestStateStats

        if self._loras is None:
            self._loras = LoRARequestStates(log_stats=True)
        lora = None if request.lora_request is None else request.lora_request.lora_name
        self._requests[request.request_id] = _RequestState(
            RequestStateStats(arrival_time=request.arrival_time),
            len(_prompt(request.prompt_token_ids, request.prompt_embeds)),
            request.sampling_params.max_tokens,
            lora,
        )

    def remove(self, engine_ids: list[str]) -> None:
        for each in engine_ids:
            if (state := self._requests.pop(each, None)) is not None and self._loras is not None:
                self._loras.request_finished(each, state.lora)

    def on_step(self, outputs: Any) -> None:
        """Record the outputs of a step."""
        if self.logger is None:
            return
        from vllm.v1.metrics.stats import IterationStats

        iteration = IterationStats() if outputs.outputs else None
        for output in outputs.outputs:
            state = self._requests.get(output.request_id)
            if state is not None and iteration is not None:
                self._update(iteration, output, state, outputs.timestamp)
        if self._loras is not None:
            self._loras.update_scheduler_stats(outputs.scheduler_stats)
        self.logger.record(outputs.scheduler_stats, iteration, engine_idx=outputs.engine_index)

    def _update(self, iteration: Any, output: Any, state: _RequestState, timestamp: float) -> None:
        if output.prefill_stats is not None:
            state.num_cached = output.prefill_stats.num_cached_tokens
        iteration.update_from_output(
            output, timestamp, state.is_prefilling, state.stats, self._loras, state.lora
        )
        if output.new_token_ids:
            state.is_prefilling = False
        if output.finish_reason is not None:
            iteration.update_from_finished_request(
                finish_reason=output.finish_reason,
                request_id=output.request_id,
                num_prompt_tokens=state.num_prompt_tokens,
                max_tokens_param=state.max_tokens,
                req_stats=state.stats,
                num_cached_tokens=state.num_cached,
            )
            self.remove([output.request_id])
