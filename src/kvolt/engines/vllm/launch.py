"""Starts vLLM: builds its configuration, and describes the running engine.

Blocks while the model loads, so it runs in a thread. It must not run in the event loop's thread: vLLM would start its
own output reader there.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvolt.core.card import Capacity, EngineInfo, ModelCard
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.description import card_of, info_of, limits_of
from kvolt.engines.external.requirements import (
    check_names,
    check_requirement,
    check_reserved,
    kv_events_error,
)
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.extras import EMBEDS, XARGS, loaded_processors
from kvolt.engines.vllm.symbols import REQUIREMENT, refusals, set_log_level
from kvolt.models.fetch_progress import ProgressLog
from kvolt.models.folder_export import folder_of
from kvolt.models.resolve import resolve
from kvolt.runtime.clock import Clock
from kvolt.runtime.host.environment import set_default
from kvolt.scheduler.step_plan import Limits

_KEY = "args.engine_args"
EXTENSION = "kvolt.engines.vllm.plugins.worker_extension.KvoltWorkerExtension"
NIXL = "KvoltNixlConnector"
TIERS = "KvoltTierConnector"
TIERED_NIXL = "KvoltTieredNixlConnector"
_TIERS_MODULE = "kvolt.engines.vllm.plugins.tier_connector"
_TIERED_NIXL_MODULE = "kvolt.engines.vllm.plugins.tier_with_nixl"
_READ_BYTES = 1 << 20
_NIXL_MODULE = "kvolt.engines.vllm.plugins.nixl_connector"
_NIXL_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
_MAX_LOGPROBS = 20
"""Maximum that the frontend accepts."""


@dataclass(slots=True)
class Launched:
    """A running vLLM."""

    llm: Any
    card: ModelCard
    info: EngineInfo
    limits: Limits
    vocab_size: int
    tasks: tuple[Any, ...] = ()
    events: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    """Endpoints of KV events and of their replay, per DP rank."""
    moves_kv: bool = False
    """Whether it can take part in handoffs."""
    processors: frozenset[str] = frozenset()
    """Loaded logits processors, by all their names."""
    takes_embeds: bool = False
    """Whether prompts may be embeddings."""


def launch(spec: EngineSpec, arguments: VllmArguments, folder: Path, clock: Clock) -> Launched:
    """Start vLLM. ConfigError for wrong settings. `folder`: for sockets; must exist as long as vLLM runs."""
    model, config = configure(spec, arguments, folder, clock)
    from vllm.v1.engine.async_llm import AsyncLLM

    if arguments.kv_events:
        _check_events(config)
    llm = AsyncLLM.from_vllm_config(config)
    try:
        return _launched(spec, arguments, model, llm)
    except BaseException:
        llm.shutdown()
        raise


def configure(
    spec: EngineSpec, arguments: VllmArguments, folder: Path, clock: Clock, *, headless: bool = False
) -> tuple[Path, Any]:
    """The model's folder and vLLM's configuration. `headless`: for a node other than node 0. ConfigError."""
    _set_environment()
    check_requirement(REQUIREMENT)
    from vllm.engine.arg_utils import AsyncEngineArgs

    model = folder_of(resolve(spec.model, ProgressLog(clock)))
    try:
        args = engine_args(spec, arguments, model, folder)
        known = list(AsyncEngineArgs.__dataclass_fields__)
        check_names("vLLM", args, known, _KEY, "see `vllm serve --help`, with underscores")
        return model, AsyncEngineArgs(**args).create_engine_config(headless=headless)
    except refusals() as error:  # pydantic's are ValueErrors
        raise ConfigError(
            f"vLLM refuses its arguments: {error}", key=_KEY, remedy="correct the value"
        ) from error


def _set_environment() -> None:
    """Set environment variables that vLLM reads when it is imported, unless the user has set them."""
    set_log_level()
    set_default("VLLM_NO_USAGE_STATS", "1")
    # vLLM would bind all workers of a host to its first cores; kvolt assigns cores.
    set_default("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def engine_args(spec: EngineSpec, arguments: VllmArguments, model: Path, folder: Path) -> dict[str, Any]:
    """The user's arguments, with kvolt's defaults."""
    args = dict(arguments.engine_args)
    check_reserved(args, {"model": "set it as `model`"}, _KEY)
    defaults: dict[str, Any] = {
        "model": str(model),
        "enable_prefix_caching": True,
        "worker_extension_cls": EXTENSION,
        "max_logprobs": _MAX_LOGPROBS,
    }
    if arguments.loras:
        defaults["enable_lora"] = True
    if arguments.kv_events:
        defaults["kv_events_config"] = _events_config(args, folder)
    if spec.role in _NIXL_ROLES:
        defaults["kv_transfer_config"] = {"kv_connector": NIXL, "kv_role": _NIXL_ROLES[spec.role]}
    args = defaults | args
    if spec.role in _NIXL_ROLES:
        _check_connector(args["kv_transfer_config"])
    if arguments.tiers.host:
        args |= _with_tiers(args.get("kv_transfer_config"), arguments, model)
    if isinstance(args.get("kv_transfer_config"), dict):
        from vllm.config import KVTransferConfig

        transfer = _transfer_config(args["kv_transfer_config"], arguments.hold_s)
        args["kv_transfer_config"] = KVTransferConfig(**transfer)
    if isinstance(args.get("kv_events_config"), dict):
        from vllm.config.kv_events import KVEventsConfig

        args["kv_events_config"] = KVEventsConfig(**args["kv_events_config"])
    return args


def _check_connector(transfer: Any) -> None:
    """ConfigError for a connector that may use KV after it was released."""
    name = transfer.get("kv_connector") if isinstance(transfer, dict) else transfer.kv_connector
    if name not in (NIXL, TIERED_NIXL):
        raise ConfigError(
            f"prefill and decode workers transfer KV with kvolt's connector, not with {name}: vLLM's connectors"
            " use KV that was released before it was read",
            key=f"{_KEY}.kv_transfer_config",
            remedy=f'leave it out, or set its kv_connector to "{NIXL}"',
        )


def _transfer_config(args: dict[str, Any], hold_s: float) -> dict[str, Any]:
    """Complete the configuration of kvolt's connector."""
    if args.get("kv_connector") != NIXL:
        return args
    from vllm.platforms import current_platform

    defaults: dict[str, Any] = {
        "kv_connector_module_path": _NIXL_MODULE,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": math.ceil(hold_s)},
    }
    if current_platform.is_cpu():
        defaults["kv_buffer_device"] = "cpu"
    # Two workers of a host cannot both use vLLM's default port; tickets contain the address. kvolt's connector binds
    # port 0 to a free one.
    set_default("VLLM_NIXL_SIDE_CHANNEL_HOST", _own_address())
    set_default("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    return defaults | args


def _with_tiers(transfer: Any, arguments: VllmArguments, model: Path) -> dict[str, Any]:
    """Arguments for tiers, alone or combined with the connector for handoffs."""
    tiers = _tiers_config(arguments, model)
    if transfer is None:
        return {"kv_transfer_config": tiers}
    if not isinstance(transfer, dict) or transfer.get("kv_connector") != NIXL:
        raise ConfigError(
            "tiers can be combined with kvolt's connector only",
            key="args.tiers",
            remedy="leave out tiers.host, or the kv_transfer_config",
        )
    nixl = _transfer_config(transfer, arguments.hold_s)
    both = {
        "kv_connector": TIERED_NIXL,
        "kv_connector_module_path": _TIERED_NIXL_MODULE,
        "kv_role": nixl["kv_role"],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [nixl, tiers]},
    }
    # Tiers support one KV cache group only; vLLM would assume that both connectors support several.
    return {"kv_transfer_config": both, "disable_hybrid_kv_cache_manager": True}


def _tiers_config(arguments: VllmArguments, model: Path) -> dict[str, Any]:
    return {
        "kv_connector": TIERS,
        "kv_connector_module_path": _TIERS_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": msgspec.to_builtins(arguments.tiers),
            "model": weights_identity(model),
        },
    }


def weights_identity(model: Path) -> str:
    """Digest of the weight files' names, sizes and samples; reading all of a large model takes minutes."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([*model.glob("*.safetensors"), *model.glob("*.bin"), model / "config.json"]):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(size - _READ_BYTES, 0)):
                file.seek(start)
                digest.update(file.read(_READ_BYTES))
    return digest.hexdigest()


def _own_address() -> str:
    from vllm.utils.network_utils import get_ip

    address = str(get_ip())
    return "localhost" if address in ("", "0.0.0.0", "::") else address


def _events_config(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One DP rank publishes on an IPC socket; several need ports, which vLLM numbers from the first."""
    endpoints = {"endpoint": f"ipc://{folder}/kv-events", "replay_endpoint": f"ipc://{folder}/kv-replay"}
    if args.get("data_parallel_size", 1) > 1:
        endpoints = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    return {"enable_kv_cache_events": True, "publisher": "zmq", **endpoints}


def _check_events(config: Any) -> None:
    """ConfigError if vLLM would publish no KV events although `kv_events` is set."""
    if not config.cache_config.enable_prefix_caching:
        raise kv_events_error(
            "vLLM has no prefix cache with these settings, so it publishes no KV events",
            f"{_KEY}.enable_prefix_caching",
        )
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        raise kv_events_error("vLLM publishes no KV events with these settings", f"{_KEY}.kv_events_config")


def _launched(spec: EngineSpec, arguments: VllmArguments, model: Path, llm: Any) -> Launched:
    config = llm.vllm_config
    cache, scheduler, parallel = config.cache_config, config.scheduler_config, config.parallel_config
    card = card_of(
        model,
        arguments.served_name or spec.model,
        context_length=config.model_config.max_model_len,
        block_size=cache.block_size,
    )
    # vLLM reports the sum over its ranks, while a request uses one rank; one block per rank is reserved.
    num_blocks = max((cache.num_gpu_blocks or 1) // _num_ranks(parallel) - 1, 1)
    transfer = config.kv_transfer_config
    moves_kv = transfer is not None and transfer.kv_connector in (NIXL, TIERED_NIXL)
    features = ["KvEvents"] if arguments.kv_events else []
    features += ["Prefill"] if moves_kv else []
    features += ["Lora"] if config.lora_config is not None else []
    features += ["Sleep"] if config.model_config.enable_sleep_mode else []
    capacity = Capacity(
        max_num_seqs=scheduler.max_num_seqs,
        max_batch_tokens=scheduler.max_num_batched_tokens,
        kv_total_blocks=num_blocks,
    )
    info = info_of(
        "vllm",
        spec.role,
        card,
        capacity,
        dp_ranks=tuple(range(parallel.data_parallel_size)),
        features=tuple(features),
        kv_events=arguments.kv_events,
        extras=_extras(spec.role, config.model_config),
    )
    sources = llm.engine_core.get_kv_event_sources() if arguments.kv_events else {}
    return Launched(
        llm=llm,
        card=card,
        info=info,
        limits=limits_of(info, card, arguments.max_waiting),
        vocab_size=config.model_config.get_vocab_size(),
        events={rank: (each.endpoint, each.replay_endpoint) for rank, each in sources.items()},
        moves_kv=moves_kv,
        processors=loaded_processors(config.model_config.logits_processors or ()),
        takes_embeds=config.model_config.enable_prompt_embeds,
    )


def _extras(role: Role, config: Any) -> tuple[str, ...]:
    """Extras of requests; prompt embeddings only without remote prefill (`extras`)."""
    takes_embeds = config.enable_prompt_embeds and role is Role.AGGREGATED
    return (XARGS, EMBEDS) if takes_embeds else (XARGS,)


def _num_ranks(parallel: Any) -> int:
    """DP ranks of this vLLM; with external load balancing only those of this host."""
    count: int = parallel.data_parallel_size
    if parallel.local_engines_only:
        count = parallel.data_parallel_size_local
    return max(count, 1)


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Temporary folder with a short name, since a socket path has at most 107 bytes."""
    return tempfile.TemporaryDirectory(prefix="kvolt-vllm-")
