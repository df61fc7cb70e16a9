"""How TensorRT-LLM is started: its arguments from ours, and what it says of itself once it is there.

Blocks, for as long as a model loads: for a thread. How many blocks it has it tells with its first iteration only, so
the engine asks it something before it says that it is ready (`take_figures`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.arguments import blind, check_not_given
from kvolt.engines.external.description import card_of, config_of, limits_of
from kvolt.engines.external.requirements import check_requirement
from kvolt.engines.trtllm.arguments import TrtllmArguments
from kvolt.engines.trtllm.symbols import REQUIREMENT
from kvolt.models.fetch_progress import ProgressLog
from kvolt.models.folder_export import folder_of
from kvolt.models.resolve import resolve
from kvolt.runtime.clock import Clock
from kvolt.scheduler.step_plan import Limits

_KEY = "args.llm_args"
EVENT_BUFFER = 1 << 16
"""Events that TensorRT-LLM keeps until they are asked for; older ones are lost, and found missing."""
_DEFAULT_SEQS = 64
_SEPARATED = (Role.PREFILL, Role.DECODE)


@dataclass(slots=True)
class Launched:
    """A TensorRT-LLM that is loaded."""

    llm: Any
    card: ModelCard
    info: EngineInfo
    limits: Limits
    vocab_size: int | None
    longest_prompt: int | None
    """What one of its steps computes, where a prompt is not cut into pieces."""
    has_grammars: bool
    has_loras: bool
    moves_kv: bool
    """Whether prompts can be computed for others here, or taken over."""

    def take_figures(self, num_blocks: int, max_num_seqs: int) -> None:
        """Of what there is, now that it has told. What was asked for by name stays."""
        found = self.info.capacity
        if self.llm.args.max_batch_size or not max_num_seqs:
            max_num_seqs = found.max_num_seqs
        capacity = replace(found, kv_total_blocks=num_blocks, max_num_seqs=max_num_seqs)
        self.info = replace(self.info, capacity=capacity)


def launch(spec: EngineSpec, arguments: TrtllmArguments, clock: Clock) -> Launched:
    """ConfigError for what can be corrected."""
    check_requirement(REQUIREMENT)
    from tensorrt_llm.llmapi import LLM

    model = folder_of(resolve(spec.model, ProgressLog(clock)))
    given = llm_args(spec, arguments, model)
    try:
        llm = LLM(**given)
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
    """A user's own, and what kvolt needs where the user has said nothing."""
    given = dict(arguments.llm_args)
    check_not_given(given, {"model": "name it as `model`"}, _KEY)
    defaults: dict[str, Any] = {
        "model": str(model),
        "enable_iter_perf_stats": True,
        "guided_decoding_backend": "xgrammar",
    }
    if arguments.loras:
        defaults["enable_lora"] = True
    if spec.role in _SEPARATED:
        defaults["cache_transceiver_config"] = {
            "backend": "DEFAULT",
            "kv_transfer_timeout_ms": int(arguments.hold_s * 1000),
        }
    if spec.role is Role.PREFILL:
        defaults["disable_overlap_scheduler"] = True  # as its own tests have a context server
    kv_cache: dict[str, Any] = {"enable_block_reuse": True}
    if arguments.kv_events:
        # What is told are whole blocks: parts of them that it finds would be nobody's to know of.
        kv_cache |= {"event_buffer_max_size": EVENT_BUFFER, "enable_partial_reuse": False}
    asked = given.pop("kv_cache_config", {})
    if not isinstance(asked, dict):
        raise ConfigError(
            "kv_cache_config is no table",
            key=f"{_KEY}.kv_cache_config",
            remedy="give its fields by name",
        )
    found = {**defaults, **given, "kv_cache_config": kv_cache | asked}
    if found.get("orchestrator_type") == "ray":
        raise ConfigError(
            "TensorRT-LLM tells neither figures nor KV events when Ray runs it",
            key=f"{_KEY}.orchestrator_type",
            remedy="leave it out",
        )
    if arguments.kv_events:
        _check_events(found)
    return found


def _check_events(found: dict[str, Any]) -> None:
    """ConfigError where a router would be blind, or misled: it would go by events that never come, or are another's."""
    cache = found["kv_cache_config"]
    if not (cache.get("enable_block_reuse") and cache.get("event_buffer_max_size")):
        raise blind(
            "TensorRT-LLM tells nobody of its KV blocks with these settings", f"{_KEY}.kv_cache_config"
        )
    if found.get("enable_attention_dp"):
        raise blind(
            "kvolt cannot tell the KV events of TensorRT-LLM's data-parallel ranks apart",
            f"{_KEY}.enable_attention_dp",
        )


def _launched(spec: EngineSpec, arguments: TrtllmArguments, model: Path, llm: Any) -> Launched:
    args = llm.args
    text = config_of(model).text
    context_length = args.max_seq_len or text.max_position_embeddings
    if not context_length:
        raise ConfigError(
            "nothing says how long a text may be", key=f"{_KEY}.max_seq_len", remedy="set max_seq_len"
        )
    name, block_size = arguments.served_name or spec.model, args.kv_cache_config.tokens_per_block
    card = card_of(model, name, context_length=context_length, block_size=block_size)
    moves_kv = args.cache_transceiver_config is not None
    features = ["KvEvents"] if arguments.kv_events else []
    features += ["Prefill"] if moves_kv else []
    features += ["Lora"] if args.enable_lora else []
    max_tokens = args.kv_cache_config.max_tokens
    info = EngineInfo(
        engine="trtllm",
        role=spec.role,
        model=name,
        card=card_hash(card),
        block_size=block_size,
        capacity=Capacity(
            max_num_seqs=args.max_batch_size or _DEFAULT_SEQS,
            max_batch_tokens=args.max_num_tokens or context_length,
            kv_total_blocks=max_tokens // block_size if max_tokens else 0,
        ),
        features=tuple(features),
        kv_events=arguments.kv_events,
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
