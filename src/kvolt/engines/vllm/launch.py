"""How vLLM is started: its configuration from ours, and what it says of itself once it runs.

Blocks, for as long as a model loads: for a thread. It must not be the event loop's, where vLLM would begin to read its
engine's outputs by itself.
"""

from __future__ import annotations

import hashlib
import math
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.arguments import blind, check_names, check_not_given
from kvolt.engines.external.description import card_of, limits_of
from kvolt.engines.external.requirements import check_requirement
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.extras import XARGS, loaded_processors
from kvolt.engines.vllm.prompt_embeds import EMBEDS
from kvolt.engines.vllm.refusals import refusals
from kvolt.engines.vllm.symbols import REQUIREMENT, tell_log_level
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
_MOST_LOGPROBS = 20
"""What the edge lets clients ask for."""


@dataclass(slots=True)
class Launched:
    """A vLLM that runs."""

    llm: Any
    card: ModelCard
    info: EngineInfo
    limits: Limits
    vocab_size: int
    tasks: tuple[Any, ...] = ()
    events: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    """Where each rank tells of its blocks, and repeats what was missed."""
    moves_kv: bool = False
    """Whether prompts can be computed for others here, or taken over."""
    processors: frozenset[str] = frozenset()
    """The logits processors that it has, by all their names."""
    takes_embeds: bool = False
    """Whether a prompt may come as vectors."""


def launch(spec: EngineSpec, arguments: VllmArguments, folder: Path, clock: Clock) -> Launched:
    """ConfigError for what can be corrected. `folder`: for sockets, as long as it runs."""
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
    """The model's folder, and vLLM's configuration of what we were told. `headless`: of a part that another leads.
    ConfigError."""
    _tell_environment()
    check_requirement(REQUIREMENT)
    from vllm.engine.arg_utils import AsyncEngineArgs

    model = folder_of(resolve(spec.model, ProgressLog(clock)))
    try:
        given = engine_args(spec, arguments, model, folder)
        known = list(AsyncEngineArgs.__dataclass_fields__)
        check_names("vLLM", given, known, _KEY, "see `vllm serve --help`, with underscores")
        return model, AsyncEngineArgs(**given).create_engine_config(headless=headless)
    except refusals() as error:  # pydantic's are ValueErrors
        raise ConfigError(
            f"vLLM refuses its arguments: {error}", key=_KEY, remedy="correct the value"
        ) from error


def _tell_environment() -> None:
    """What vLLM is told in no other way, and before it is imported. What a user has set stays."""
    tell_log_level()
    set_default("VLLM_NO_USAGE_STATS", "1")
    # Several workers of a host would all be bound to its first cores; kvolt gives each its own.
    set_default("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def engine_args(spec: EngineSpec, arguments: VllmArguments, model: Path, folder: Path) -> dict[str, Any]:
    """A user's own, and what kvolt needs where the user has said nothing."""
    given = dict(arguments.engine_args)
    check_not_given(given, {"model": "name it as `model`"}, _KEY)
    defaults: dict[str, Any] = {
        "model": str(model),
        "enable_prefix_caching": True,
        "worker_extension_cls": EXTENSION,
        "max_logprobs": _MOST_LOGPROBS,
    }
    if arguments.loras:
        defaults["enable_lora"] = True
    if arguments.kv_events:
        defaults["kv_events_config"] = _events_config(given, folder)
    if spec.role in _NIXL_ROLES:
        defaults["kv_transfer_config"] = {"kv_connector": NIXL, "kv_role": _NIXL_ROLES[spec.role]}
    given = defaults | given
    if spec.role in _NIXL_ROLES:
        _check_connector(given["kv_transfer_config"])
    if arguments.tiers.host:
        given |= _with_tiers(given.get("kv_transfer_config"), arguments, model)
    if isinstance(given.get("kv_transfer_config"), dict):
        from vllm.config import KVTransferConfig

        transfer = _transfer_config(given["kv_transfer_config"], arguments.hold_s)
        given["kv_transfer_config"] = KVTransferConfig(**transfer)
    if isinstance(given.get("kv_events_config"), dict):
        from vllm.config.kv_events import KVEventsConfig

        given["kv_events_config"] = KVEventsConfig(**given["kv_events_config"])
    return given


def _check_connector(transfer: Any) -> None:
    """ConfigError for a connector by which an answer could go on from KV that is another request's."""
    name = transfer.get("kv_connector") if isinstance(transfer, dict) else transfer.kv_connector
    if name not in (NIXL, TIERED_NIXL):
        raise ConfigError(
            f"prefill and decode workers hand KV over with kvolt's own connector, not with {name}: vLLM's connectors"
            " use KV that was released before it was read",
            key=f"{_KEY}.kv_transfer_config",
            remedy=f'leave it out, or set its kv_connector to "{NIXL}"',
        )


def _transfer_config(given: dict[str, Any], hold_s: float) -> dict[str, Any]:
    """Of our own connector, what it needs besides its name."""
    if given.get("kv_connector") != NIXL:
        return given
    from vllm.platforms import current_platform

    defaults: dict[str, Any] = {
        "kv_connector_module_path": _NIXL_MODULE,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": math.ceil(hold_s)},
    }
    if current_platform.is_cpu():
        defaults["kv_buffer_device"] = "cpu"
    # Two workers of a host cannot both have vLLM's default; where KV is to be fetched, the ticket says.
    set_default("VLLM_NIXL_SIDE_CHANNEL_HOST", _own_address())
    set_default("VLLM_NIXL_SIDE_CHANNEL_PORT", str(_free_port()))
    return defaults | given


def _with_tiers(transfer: Any, arguments: VllmArguments, model: Path) -> dict[str, Any]:
    """Arguments for tiers, alone or beside the connector by which KV goes to other workers."""
    tiers = _tiers_config(arguments, model)
    if transfer is None:
        return {"kv_transfer_config": tiers}
    if not isinstance(transfer, dict) or transfer.get("kv_connector") != NIXL:
        raise ConfigError(
            "a vLLM worker has tiers beside kvolt's own connector, and no other",
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
    # Tiers are for models with one kind of layers; vLLM would take the two connectors' word for more.
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
    """Equal for equal weights: names, sizes and parts of their files. To read all of a large model takes minutes."""
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def _events_config(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One rank tells by a socket of its own; several need ports, which vLLM counts on from the first."""
    where = {"endpoint": f"ipc://{folder}/kv-events", "replay_endpoint": f"ipc://{folder}/kv-replay"}
    if given.get("data_parallel_size", 1) > 1:
        where = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    return {"enable_kv_cache_events": True, "publisher": "zmq", **where}


def _check_events(config: Any) -> None:
    """ConfigError where a router would be blind: it would go by events that never come."""
    if not config.cache_config.enable_prefix_caching:
        raise blind(
            "vLLM keeps no prefixes with these settings, so it has no KV events to tell",
            f"{_KEY}.enable_prefix_caching",
        )
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        raise blind("vLLM tells nobody of its KV blocks with these settings", f"{_KEY}.kv_events_config")


def _launched(spec: EngineSpec, arguments: VllmArguments, model: Path, llm: Any) -> Launched:
    config = llm.vllm_config
    cache, scheduler, parallel = config.cache_config, config.scheduler_config, config.parallel_config
    card = card_of(
        model,
        arguments.served_name or spec.model,
        context_length=config.model_config.max_model_len,
        block_size=cache.block_size,
    )
    # vLLM adds up what its ranks have, of which requests can use their own; one block of each stands for nothing.
    num_blocks = max((cache.num_gpu_blocks or 1) // _num_ranks(parallel) - 1, 1)
    transfer = config.kv_transfer_config
    moves_kv = transfer is not None and transfer.kv_connector in (NIXL, TIERED_NIXL)
    features = ["KvEvents"] if arguments.kv_events else []
    features += ["Prefill"] if moves_kv else []
    features += ["Lora"] if config.lora_config is not None else []
    features += ["Sleep"] if config.model_config.enable_sleep_mode else []
    info = EngineInfo(
        engine="vllm",
        role=spec.role,
        model=card.name,
        card=card_hash(card),
        block_size=card.block_size,
        capacity=Capacity(
            max_num_seqs=scheduler.max_num_seqs,
            max_batch_tokens=scheduler.max_num_batched_tokens,
            kv_total_blocks=num_blocks,
        ),
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
    """Vectors only where prompts are computed where they are answered (`prompt_embeds`)."""
    takes_embeds = config.enable_prompt_embeds and role is Role.AGGREGATED
    return (XARGS, EMBEDS) if takes_embeds else (XARGS,)


def _num_ranks(parallel: Any) -> int:
    """That this vLLM leads: where others balance between ranks, those of its own host."""
    count: int = parallel.data_parallel_size
    if parallel.local_engines_only:
        count = parallel.data_parallel_size_local
    return max(count, 1)


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Short: a socket's path has 107 bytes."""
    return tempfile.TemporaryDirectory(prefix="kvolt-vllm-")
