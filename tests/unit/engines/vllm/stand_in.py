"""A stand-in for the package `vllm`: the names that the adapter uses, shaped as those of 0.32, over a tiny scheduler.

Read off its source: fields and their order, which values it refuses and by what error, what a request becomes on its
way to the core. What it computes with is in `fake_core`. `install` puts it in the place of the package.
"""

from __future__ import annotations

import base64
import json as json_module
import sys
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from tests.unit.engines.vllm.fake_core import (
    EOS,
    VOCAB_SIZE,
    Core,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    PrefillStats,
    SchedulerStats,
)

VERSION = "0.32.0"
ENVIRONMENT = (
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
)
"""What a launch may set."""


class VLLMClientError(Exception):
    """No ValueError."""


class VLLMValidationError(VLLMClientError):
    pass


# --- vllm.sampling_params


@dataclass
class StructuredOutputsParams:
    json: str | dict | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        kinds = (self.json, self.regex, self.choice, self.grammar, self.json_object, self.structural_tag)
        if sum(kind is not None for kind in kinds) != 1:
            raise VLLMValidationError("You must use one kind of structured outputs constraint")


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_clone: bool = False
    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self._verify_args()
        if self.temperature < 1e-5:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        self._all_stop_token_ids.update(self.stop_token_ids)
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _verify_args(self) -> None:
        allowed = {
            "presence_penalty must be in [-2, 2]": -2.0 <= self.presence_penalty <= 2.0,
            "frequency_penalty must be in [-2, 2]": -2.0 <= self.frequency_penalty <= 2.0,
            "repetition_penalty must be greater than zero": self.repetition_penalty > 0.0,
            "temperature must be in [0, 2]": 0.0 <= self.temperature <= 2.0,
            "top_p must be in (0, 1]": 0.0 < self.top_p <= 1.0,
            "top_k must be 0 (disable), or at least 1": self.top_k >= -1,
            "min_p must be in [0, 1]": 0.0 <= self.min_p <= 1.0,
            "max_tokens must be at least 1": self.max_tokens is None or self.max_tokens >= 1,
            "min_tokens must be greater than or equal to 0": self.min_tokens >= 0,
            "min_tokens must be less than or equal to max_tokens": self.max_tokens is None
            or self.min_tokens <= self.max_tokens,
            "logprobs must be non-negative or -1": self.logprobs is None or self.logprobs >= -1,
        }
        for rule, is_kept in allowed.items():
            if not is_kept:
                raise VLLMValidationError(f"{rule}.")

    def update_from_generation_config(self, config: dict[str, Any], eos_token_id: int | None) -> None:
        if not self.ignore_eos:
            self._eos_token_id = eos_token_id
        if eos_token_id is not None:
            self._all_stop_token_ids.add(eos_token_id)
        given = config.get("eos_token_id")
        eos_ids = {given} if isinstance(given, int) else set(given or ())
        eos_ids.discard(eos_token_id)
        self._all_stop_token_ids.update(eos_ids)
        if eos_ids and not self.ignore_eos:
            self.stop_token_ids = list(eos_ids.union(self.stop_token_ids or ()))

    def clone(self) -> SamplingParams:
        return self if self.skip_clone else msgspec.structs.replace(self)


# --- vllm.inputs.engine, vllm.lora.request


def tokens_input(
    prompt_token_ids: list[int], *, prompt: str | None = None, cache_salt: str | None = None
) -> dict[str, Any]:
    inputs: dict[str, Any] = {"type": "token", "prompt_token_ids": prompt_token_ids}
    if cache_salt is not None:
        inputs["cache_salt"] = cache_salt
    return inputs


class LoRARequest(msgspec.Struct, omit_defaults=True, array_like=True):
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {self.lora_int_id}")
        assert self.lora_path, "lora_path cannot be empty"


# --- configurations


@dataclass
class KVEventsConfig:
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"


@dataclass
class KVTransferConfig:
    kv_connector: str | None = None
    engine_id: str | None = None
    kv_buffer_device: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    kv_load_failure_policy: str = "fail"

    def __post_init__(self) -> None:
        if self.kv_role not in (None, "kv_producer", "kv_consumer", "kv_both"):
            raise ValueError(f"Unsupported kv_role: {self.kv_role}.")


@dataclass
class AsyncEngineArgs:
    model: str = ""
    dtype: str = "auto"
    max_model_len: int = 256
    block_size: int = 16
    num_gpu_blocks_override: int = 201
    max_num_seqs: int = 48
    max_num_batched_tokens: int = 64
    enable_prefix_caching: bool = True
    worker_extension_cls: str = ""
    max_logprobs: int = 20
    enable_lora: bool = False
    enable_sleep_mode: bool = False
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    logits_processors: list[Any] | None = None
    enable_prompt_embeds: bool = False
    disable_hybrid_kv_cache_manager: bool | None = None
    kv_events_config: KVEventsConfig | None = None
    kv_transfer_config: KVTransferConfig | None = None

    def create_engine_config(self, headless: bool = False) -> SimpleNamespace:
        if self.max_model_len < 1:
            raise ValueError("max_model_len must be a positive integer")
        return SimpleNamespace(
            args=self,
            cache_config=SimpleNamespace(
                block_size=self.block_size,
                num_gpu_blocks=self.num_gpu_blocks_override * self.data_parallel_size,
                enable_prefix_caching=self.enable_prefix_caching,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens
            ),
            parallel_config=SimpleNamespace(
                data_parallel_size=self.data_parallel_size, local_engines_only=False
            ),
            model_config=SimpleNamespace(
                max_model_len=self.max_model_len,
                enable_sleep_mode=self.enable_sleep_mode,
                logits_processors=self.logits_processors,
                enable_prompt_embeds=self.enable_prompt_embeds,
                get_vocab_size=lambda: VOCAB_SIZE,
            ),
            lora_config=SimpleNamespace() if self.enable_lora else None,
            kv_events_config=self.kv_events_config,
            kv_transfer_config=self.kv_transfer_config,
        )


# --- prompts as vectors


def embeds_input(rows: Any, **more: Any) -> dict[str, Any]:
    return {"type": "embeds", "prompt_embeds": rows, **{k: v for k, v in more.items() if v is not None}}


def safe_load_prompt_embeds(model_config: Any, embed: str) -> Any:
    """Here a vector has one figure, the number of its token, and they come as JSON."""
    import torch

    assert model_config.enable_prompt_embeds
    return torch.tensor(json_module.loads(base64.b64decode(embed, validate=True)), dtype=torch.float32)


def _embedded(prompt: dict[str, Any]) -> list[int]:
    found = [int(row[0]) for row in prompt["prompt_embeds"]]
    are_tokens = prompt.get("is_token_ids") or [False] * len(found)
    tokens = prompt.get("prompt_token_ids") or found
    return [
        token if is_token else row for row, token, is_token in zip(found, tokens, are_tokens, strict=True)
    ]


# --- the engine as its server sees it


class InputProcessor:
    def __init__(self, config: Any, generation: dict[str, Any]) -> None:
        self._config = config
        self._generation = generation

    def process_inputs(
        self,
        request_id: str,
        prompt: dict[str, Any],
        params: SamplingParams,
        supported_tasks: tuple[str, ...],
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> EngineCoreRequest:
        tokens = _embedded(prompt) if prompt["type"] == "embeds" else prompt["prompt_token_ids"]
        self._validate(tokens, params, supported_tasks)
        if lora_request is not None and self._config.lora_config is None:
            raise VLLMValidationError(f"Got lora_request {lora_request} but LoRA is not enabled!")
        num_ranks = self._config.parallel_config.data_parallel_size
        if data_parallel_rank is not None and not 0 <= data_parallel_rank < num_ranks:
            raise VLLMValidationError(f"data_parallel_rank {data_parallel_rank} is out of range")
        sampling = params.clone()
        sampling.update_from_generation_config(self._generation, EOS)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tokens,
            prompt_embeds=prompt.get("prompt_embeds"),
            sampling_params=sampling,
            arrival_time=arrival_time or time.time(),
            lora_request=lora_request,
            cache_salt=prompt.get("cache_salt"),
            data_parallel_rank=data_parallel_rank,
            priority=priority,
        )

    def _validate(self, tokens: list[int], params: SamplingParams, tasks: tuple[str, ...]) -> None:
        if "generate" not in tasks:
            raise VLLMValidationError("This model does not support generation")
        if len(tokens) > self._config.model_config.max_model_len:
            raise VLLMValidationError("The decoder prompt is longer than the maximum model length")
        limit = self._config.args.max_logprobs
        if max(params.logprobs or 0, params.prompt_logprobs or 0) > limit:
            raise VLLMValidationError(f"Requested logprobs are greater than max allowed: {limit}")
        structured = params.structured_outputs
        if structured is not None and isinstance(structured.json, str):
            try:
                json_module.loads(structured.json)
            except ValueError as error:
                raise VLLMValidationError("Invalid JSON grammar specification.") from error


class LoggerManager:
    def __init__(self) -> None:
        self.records: list[tuple[Any, Any, int]] = []

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.records.append((scheduler_stats, iteration_stats, engine_idx))


class AsyncLLM:
    made: ClassVar[list[AsyncLLM]] = []

    def __init__(self, vllm_config: Any) -> None:
        folder = Path(vllm_config.args.model)
        found = folder / "generation_config.json"
        generation = json_module.loads(found.read_text()) if found.exists() else {}
        self.vllm_config = vllm_config
        self.engine_core = Core(vllm_config)
        self.input_processor = InputProcessor(vllm_config, generation)
        self.logger_manager: LoggerManager | None = LoggerManager()
        self.num_shutdowns = 0
        AsyncLLM.made.append(self)

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> AsyncLLM:
        return cls(vllm_config)

    def shutdown(self, timeout: float | None = None) -> None:
        self.num_shutdowns += 1
        self.engine_core.shutdown(timeout)


# --- statistics


@dataclass
class RequestStateStats:
    arrival_time: float = 0.0


@dataclass
class IterationStats:
    num_generation_tokens: int = 0
    finished_requests: list[dict[str, Any]] = field(default_factory=list)

    def update_from_output(self, output: EngineCoreOutput, *_: Any) -> None:
        self.num_generation_tokens += len(output.new_token_ids)

    def update_from_finished_request(self, **told: Any) -> None:
        self.finished_requests.append(told)


@dataclass
class LoRARequestStates:
    log_stats: bool = False

    def request_finished(self, req_id: str, lora_name: str | None) -> None:
        pass

    def update_scheduler_stats(self, scheduler_stats: Any) -> None:
        pass


class InputBatch:
    def add_request(self, request: Any) -> int:
        raise NotImplementedError


def modules() -> dict[str, dict[str, Any]]:
    return {
        "vllm": {"__version__": VERSION},
        "vllm.sampling_params": {
            "SamplingParams": SamplingParams,
            "StructuredOutputsParams": StructuredOutputsParams,
            "RequestOutputKind": RequestOutputKind,
        },
        "vllm.exceptions": {"VLLMClientError": VLLMClientError},
        "vllm.inputs": {},
        "vllm.inputs.engine": {"tokens_input": tokens_input, "embeds_input": embeds_input},
        "vllm.renderers": {},
        "vllm.renderers.embed_utils": {"safe_load_prompt_embeds": safe_load_prompt_embeds},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.config": {"KVTransferConfig": KVTransferConfig},
        "vllm.config.kv_events": {"KVEventsConfig": KVEventsConfig},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "10.1.2.3"},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
        "vllm.v1": {},
        "vllm.v1.engine": {
            "EngineCoreOutput": EngineCoreOutput,
            "EngineCoreOutputs": EngineCoreOutputs,
            "EngineCoreRequest": EngineCoreRequest,
        },
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.v1.engine.core_client": {"EngineCoreClient": Core},
        "vllm.v1.engine.input_processor": {"InputProcessor": InputProcessor},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.stats": {
            "SchedulerStats": SchedulerStats,
            "PrefillStats": PrefillStats,
            "RequestStateStats": RequestStateStats,
            "IterationStats": IterationStats,
            "LoRARequestStates": LoRARequestStates,
        },
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_input_batch": {"InputBatch": InputBatch},
    }


def install(monkeypatch: pytest.MonkeyPatch, site: Path, version: str = VERSION) -> None:
    """As an installed package: modules, a version, and no trace of what it sets in the environment."""
    AsyncLLM.made.clear()
    for name, content in modules().items():
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(site))
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
