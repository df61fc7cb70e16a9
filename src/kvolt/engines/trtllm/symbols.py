"""TensorRT-LLM symbols that the adapter uses, checked at start so that an incompatible version fails early.

Optional symbols (newer fields of DisaggregatedParams) are not listed.
"""

from __future__ import annotations

from kvolt.engines.external.requirements import Requirement

_API = "tensorrt_llm.llmapi"
_PARAMS = f"{_API}:SamplingParams"
_DISAGGREGATED = f"{_API}:DisaggregatedParams"

REQUIREMENT = Requirement(
    user="the trtllm engine",
    distributions=("tensorrt-llm", "tensorrt_llm"),
    tested=("nothing yet",),  # see docs/trtllm.md
    symbols=(
        *(f"{_API}:LLM.{name}" for name in ("generate_async", "shutdown")),
        *(f"{_API}:LLM.{name}" for name in ("get_stats_async", "get_kv_cache_events_async")),
        *(
            f"{_PARAMS}.{name}"
            for name in ("end_id", "max_tokens", "stop_token_ids", "ignore_eos", "detokenize")
        ),
        *(f"{_PARAMS}.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "logprobs")),
        *(f"{_PARAMS}.{name}_penalty" for name in ("repetition", "presence", "frequency")),
        *(f"{_PARAMS}.{name}" for name in ("guided_decoding", "include_stop_str_in_output")),
        *(f"{_API}:GuidedDecodingParams.{name}" for name in ("json", "json_object", "regex", "grammar")),
        f"{_API}:GuidedDecodingParams.structural_tag",
        *(f"{_DISAGGREGATED}.{name}" for name in ("request_type", "first_gen_tokens", "ctx_request_id")),
        *(f"{_DISAGGREGATED}.{name}" for name in ("opaque_state", "draft_tokens")),
        f"{_API}:LoRARequest",
        f"{_API}:RequestError",
        f"{_API}:KvCacheConfig",
        f"{_API}:CompletionOutput.token_ids",
        f"{_API}:RequestOutput.abort",
    ),
    remedy="install TensorRT-LLM 1.2 as in its documentation: its container, or pip with NVIDIA's index",
)
