"""KvoltTierConnector: kvolt's host and disk tiers for vLLM (`kv_connector_module_path`).

Runs in vLLM's processes. Forwards vLLM's connector calls to `TierScheduler` or `TierWorker`, whichever this process
has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import msgspec
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvolt.core.kv_events import Tier
from kvolt.engines.vllm.arguments import VllmTiers, names_folder
from kvolt.engines.vllm.plugins.tier_events import TierEvents
from kvolt.engines.vllm.plugins.tier_messages import InitialTierUpdate, TierCommands, event_of, extra_keys_of
from kvolt.engines.vllm.plugins.tier_names import NamesFile
from kvolt.engines.vllm.plugins.tier_onboard_policy import TierOnboardPolicy
from kvolt.engines.vllm.plugins.tier_scheduler import TierScheduler
from kvolt.engines.vllm.plugins.tier_worker import TierWorker

_HIT_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}


class TierStatistics(KVConnectorStats):  # type: ignore[misc]
    """Counters of the tiers, sent to kvolt's worker (`tier_stats`). They are totals: later ones replace earlier
    ones."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: Any) -> Any:
        self.data = other.data or self.data
        return self

    def reduce(self) -> dict[str, Any]:
        return {
            f"{tier} {name}": value
            for tier, counters in self.data.get("tiers", {}).items()
            for name, value in counters.items()
            if name in ("num_blocks", "num_stored", "num_loaded")
        }

    def is_empty(self) -> bool:
        return not self.data


class _NoMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """kvolt's worker exports them under its own names."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        pass


class KvoltTierConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("kvolt's tiers support models with one KV cache group only")
        extra_config = self._kv_transfer_config.kv_connector_extra_config
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
            raise ValueError("kvolt's tiers do not support pipeline or context parallelism")
        self._settings = msgspec.convert(extra_config["tiers"], VllmTiers)
        self._identity = identity_of(vllm_config, str(extra_config["model"]))
        self._num_blocks = kv_cache_config.num_blocks
        self._rank = parallel.rank
        self._degree = parallel.world_size
        self._block_size = vllm_config.cache_config.block_size
        self._scheduler: TierScheduler | None = None
        self._worker: TierWorker | None = None
        self._events: TierEvents | None = None
        self._is_new = True
        """Whether no step has reported the initial content of the tiers yet."""
        self._last_stats: dict[str, Any] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._events = self._new_events(vllm_config)
            self._scheduler = TierScheduler(
                self._block_size,
                parallel.world_size,
                self._identity,
                TierOnboardPolicy(self._block_size, vllm_config.scheduler_config.max_num_batched_tokens),
                self._events,
                extra_keys_of,
            )

    @property
    def _short_identity(self) -> str:
        return hashlib.blake2b(self._identity, digest_size=8).hexdigest()

    def _new_events(self, vllm_config: Any) -> TierEvents | None:
        config = vllm_config.kv_events_config
        if config is None or not config.enable_kv_cache_events:
            return None
        folder = names_folder(self._settings, self._short_identity)
        return TierEvents(None if folder is None else NamesFile(folder))

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost block is computed

    # --- scheduler process

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        assert self._scheduler is not None
        num_tokens = self._scheduler.find_offloaded(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.on_allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        assert self._scheduler is not None
        tiers = self._scheduler.tiers_of_load(request.request_id)
        hits = {_HIT_SOURCES[tier]: count * self._block_size for tier, count in tiers.items()}
        if sum(hits.values()) != num_external_tokens:
            return super().get_external_cache_hit_sources(request, num_external_tokens)  # type: ignore[no-any-return]
        return hits

    def build_connector_meta(self, scheduler_output: Any) -> TierCommands:
        assert self._scheduler is not None
        self._is_new = False
        return self._scheduler.build_commands(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduler.apply_update(connector_output.kv_connector_worker_meta)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Called once before any request: content of the disk tiers."""
        assert self._scheduler is not None
        self._scheduler.apply_initial(
            each.update
            for each in metadata.values()
            if isinstance(each, InitialTierUpdate) and each.update is not None
        )

    def take_events(self) -> Iterable[Any]:
        if self._events is None:
            return ()
        return [event_of(change, self._block_size) for change in self._events.take_events()]

    def has_pending_push_work(self) -> bool:
        """True lets vLLM run a step without requests, so that the content of the disk is published before the first
        request."""
        if self._events is None or not self._settings.disk:
            return False
        return self._is_new or self._events.is_due

    def get_kv_connector_stats(self) -> Any:
        if self._scheduler is None:
            return None
        stats = self._scheduler.stats()
        if stats == self._last_stats:
            return None
        self._last_stats = stats
        return TierStatistics(data=stats)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        return _NoMetrics(*args)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return TierStatistics(data=data or {})

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.on_finished(request.request_id), None

    def reset_cache(self) -> bool:
        assert self._scheduler is not None
        self._scheduler.clear()
        return True

    # --- worker process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layers = [kv_caches[name] for name in sorted(kv_caches)]
        piece = f"{self._short_identity}-{self._rank}-of-{self._degree}"
        self._worker = TierWorker(layers, self._num_blocks, self._settings, piece)

    def get_handshake_metadata(self) -> InitialTierUpdate | None:
        return None if self._worker is None else InitialTierUpdate(self._worker.take_update())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self._worker is not None:
            self._worker.begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: a request continues when all of its blocks are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """No-op: whole blocks are copied after the step."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.start_stores(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        released, loaded = self._worker.take_finished()
        return released or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Any:
        return self._worker.take_update() if self._worker is not None else None

    def shutdown(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def identity_of(vllm_config: Any, model: str) -> bytes:
    """Digest of everything that determines the bytes of a block besides tokens, adapter and salt."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    facts = {
        "model": model,
        "dtype": str(vllm_config.model_config.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "config": json.loads(vllm_config.model_config.hf_config.to_json_string()),
        "quantization": str(vllm_config.model_config.quantization),
        "layout": str(envs.VLLM_KV_CACHE_LAYOUT),
        "backend": str(vllm_config.attention_config.backend),
        "platform": current_platform.device_type,
        "vllm": vllm.__version__,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=32).digest()
