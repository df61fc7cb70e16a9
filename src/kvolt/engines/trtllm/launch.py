"""Starts TensorRT-LLM: builds its arguments, and describes the loaded engine.

Blocks while the model loads, so it runs in a thread. TensorRT-LLM reports its number of blocks only with its first
iteration, so the engine runs a warm-up request before it is ready (`set_capacity`). The symbols that the adapter uses
are checked first, except optional ones (newer fields of DisaggregatedParams).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvolt.core.card import Capacity, EngineInfo, ModelCard
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.description import card_of, config_of, info_of, limits_of
from kvolt.engines.external.requirements import (
    Requirement,
    check_requirement,
    check_reserved,
    kv_events_error,
    members,
)
from kvolt.engines.trtllm.arguments import TrtllmArguments
from kvolt.models.fetch_progress import ProgressLog
from kvolt.models.folder_export import folder_of
from kvolt.models.resolve import resolve
from kvolt.runtime.clock import Clock
from kvolt.scheduler.step_plan import Limits

_API = "tensorrt_llm.llmapi"
_PARAMS = f"{_API}:SamplingParams"
_DISAGGREGATED = f"{_API}:DisaggregatedParams"

REQUIREMENT = Requirement(
    user="the trtllm engine",
    distributions=("tensorrt-llm", "tensorrt_llm"),
    tested=("nothing yet",),  # see docs/trtllm.md
    symbols=(
        *members(f"{_API}:LLM", "generate_async shutdown get_stats_async get_kv_cache_events_async"),
        *members(_PARAMS, "end_id max_tokens stop_token_ids ignore_eos detokenize"),
        *members(_PARAMS, "temperature top_p top_k min_p seed logprobs"),
        *members(_PARAMS, "repetition_penalty presence_penalty frequency_penalty"),
        *members(_PARAMS, "guided_decoding include_stop_str_in_output"),
        *members(f"{_API}:GuidedDecodingParams", "json json_object regex grammar structural_tag"),
        *members(_DISAGGREGATED, "request_type first_gen_tokens ctx_request_id opaque_state draft_tokens"),
        *members(
            _API, "LoRARequest RequestError KvCacheConfig CompletionOutput.token_ids RequestOutput.abort"
        ),
    ),
    remedy="install TensorRT-LLM 1.2 as in its documentation: its container, or pip with NVIDIA's index",
)


_KEY = "args.llm_args"
EVENT_BUFFER = 1 << 16
"""Events buffered between polls; older ones are dropped and detected as a gap."""
_DEFAULT_SEQS = 64
_DISAGGREGATED_ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(slots=True)
class Launched:
    """A loaded TensorRT-LLM."""

    llm: Any
    card: ModelCard
    info: EngineInfo
    limits: Limits
    vocab_size: int | None
    longest_prompt: int | None
    """Maximum prompt without chunked prefill: the tokens of one step. None with chunked prefill."""
    has_grammars: bool
    has_loras: bool
    moves_kv: bool
    """Whether it can take part in handoffs."""

    def set_capacity(self, num_blocks: int, max_num_seqs: int) -> None:
        """Set the real capacity; a configured max_batch_size is kept."""
        current = self.info.capacity
        if self.llm.args.max_batch_size or not max_num_seqs:
            max_num_seqs = current.max_num_seqs
        capacity = replace(current, kv_total_blocks=num_blocks, max_num_seqs=max_num_seqs)
        self.info = replace(self.info, capacity=capacity)


def launch(spec: EngineSpec, arguments: TrtllmArguments, clock: Clock) -> Launched:
    """Start TensorRT-LLM. ConfigError for wrong settings."""
    check_requirement(REQUIREMENT)
    from tensorrt_llm.llmapi import LLM

    model = folder_of(resolve(spec.model, ProgressLog(clock)))
    fields = llm_args(spec, arguments, model)
    try:
        llm = LLM(**fields)
    except (ValueError, TypeError) as error:  # pydantic's are ValueErrors
        raise ConfigError(
            f"TensorRT-LLM refuses its arguments: {error}", key=_KEY, remedy="correct the value"
        ) from error
    try:
        return _launched(spec, arguments, model, llm)
    except BaseException:
        llm.shutdown()
        raise


def llm_args(spec: EngineSpec, arguments: TrtllmArguments, model: Path) -> dict[str, Any]:
    """The user's arguments, with kvolt's defaults."""
    user_args = dict(arguments.llm_args)
    check_reserved(user_args, {"model": "set it as `model`"}, _KEY)
    defaults: dict[str, Any] = {
        "model": str(model),
        "enable_iter_perf_stats": True,
        "guided_decoding_backend": "xgrammar",
    }
    if arguments.loras:
        defaults["enable_lora"] = True
    if spec.role in _DISAGGREGATED_ROLES:
        defaults["cache_transceiver_config"] = {
            "backend": "DEFAULT",
            "kv_transfer_timeout_ms": int(arguments.hold_s * 1000),
        }
    if spec.role is Role.PREFILL:
        defaults["disable_overlap_scheduler"] = True  # as in its own tests of context servers
    kv_cache: dict[str, Any] = {"enable_block_reuse": True}
    if arguments.kv_events:
        # Events describe whole blocks only; hits of partial blocks would be unknown to routers.
        kv_cache |= {"event_buffer_max_size": EVENT_BUFFER, "enable_partial_reuse": False}
    user_kv_cache = user_args.pop("kv_cache_config", {})
    if not isinstance(user_kv_cache, dict):
        raise ConfigError(
            "kv_cache_config is not a table",
            key=f"{_KEY}.kv_cache_config",
            remedy="set its fields by name",
        )
    fields = {**defaults, **user_args, "kv_cache_config": kv_cache | user_kv_cache}
    if fields.get("orchestrator_type") == "ray":
        raise ConfigError(
            "with Ray, TensorRT-LLM reports neither statistics nor KV events",
            key=f"{_KEY}.orchestrator_type",
            remedy="leave it out",
        )
    if arguments.kv_events:
        _check_events(fields)
    return fields


def _check_events(fields: dict[str, Any]) -> None:
    """ConfigError if TensorRT-LLM would publish no KV events, or ambiguous ones, although `kv_events` is set."""
    cache = fields["kv_cache_config"]
    if not (cache.get("enable_block_reuse") and cache.get("event_buffer_max_size")):
        raise kv_events_error(
            "TensorRT-LLM publishes no KV events with these settings", f"{_KEY}.kv_cache_config"
        )
    if fields.get("enable_attention_dp"):
        raise kv_events_error(
            "KV events of TensorRT-LLM's data-parallel ranks cannot be distinguished",
            f"{_KEY}.enable_attention_dp",
        )


def _launched(spec: EngineSpec, arguments: TrtllmArguments, model: Path, llm: Any) -> Launched:
    args = llm.args
    text = config_of(model).text
    context_length = args.max_seq_len or text.max_position_embeddings
    if not context_length:
        raise ConfigError(
            "the maximum sequence length is unknown", key=f"{_KEY}.max_seq_len", remedy="set max_seq_len"
        )
    name, block_size = arguments.served_name or spec.model, args.kv_cache_config.tokens_per_block
    card = card_of(model, name, context_length=context_length, block_size=block_size)
    moves_kv = args.cache_transceiver_config is not None
    features = ["KvEvents"] if arguments.kv_events else []
    features += ["Prefill"] if moves_kv else []
    features += ["Lora"] if args.enable_lora else []
    max_tokens = args.kv_cache_config.max_tokens
    capacity = Capacity(
        max_num_seqs=args.max_batch_size or _DEFAULT_SEQS,
        max_batch_tokens=args.max_num_tokens or context_length,
        kv_total_blocks=max_tokens // block_size if max_tokens else 0,
    )
    info = info_of(
        "trtllm", spec.role, card, capacity, features=tuple(features), kv_events=arguments.kv_events
    )
    return Launched(
        llm=llm,
        card=card,
        info=info,
        limits=limits_of(info, card, arguments.max_waiting),
        vocab_size=text.vocab_size,
        longest_prompt=None if args.enable_chunked_prefill else args.max_num_tokens,
        has_grammars=args.guided_decoding_backend is not None,
        has_loras=bool(args.enable_lora),
        moves_kv=moves_kv,
    )
