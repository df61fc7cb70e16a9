"""KvoltTierConnector: kvolt's tiers behind a vLLM (`kv_connector_module_path`). Both halves are made here.

Runs in vLLM's processes. What vLLM asks of a connector is passed on to the half that this process has.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.platforms import current_platform

from kvolt.engines.vllm.tier_messages import Found, Orders
from kvolt.engines.vllm.tier_scheduler import TierScheduler
from kvolt.engines.vllm.tier_settings import VllmTiers
from kvolt.engines.vllm.tier_worker import TierWorker


class KvoltTierConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("kvolt's tiers are for models whose layers all keep whole prefixes")
        given = self._kv_transfer_config.kv_connector_extra_config
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
            raise ValueError("kvolt's tiers are not made for pipeline or context parallel workers")
        self._settings = msgspec.convert(given["tiers"], VllmTiers)
        self._identity = identity_of(vllm_config, str(given["model"]))
        self._num_blocks = kv_cache_config.num_blocks
        self._rank = parallel.rank
        self._degree = parallel.world_size
        self._scheduler: TierScheduler | None = None
        self._worker: TierWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = TierScheduler(
                vllm_config.cache_config.block_size, parallel.world_size, self._identity
            )

    # --- beside the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        assert self._scheduler is not None
        num_tokens = self._scheduler.find(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        assert self._scheduler is not None
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduler.told(connector_output.kv_connector_worker_meta)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Once, before any request: what a disk has kept."""
        assert self._scheduler is not None
        for found in metadata.values():
            if isinstance(found, Found) and found.told is not None:
                self._scheduler.told(found.told)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.finished(request.request_id), None

    def reset_cache(self) -> bool:
        assert self._scheduler is not None
        self._scheduler.clear()
        return True

    # --- in a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layers = [kv_caches[name] for name in sorted(kv_caches)]
        identity = hashlib.blake2b(self._identity, digest_size=8).hexdigest()
        piece = f"{identity}-{self._rank}-of-{self._degree}"
        self._worker = TierWorker(layers, self._num_blocks, self._settings, piece)

    def get_handshake_metadata(self) -> Found | None:
        return None if self._worker is None else Found(self._worker.take_told())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self._worker is not None:
            self._worker.fence()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.obey(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request goes on when all of its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are copied whole, after the step."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.store(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        gone, brought = self._worker.finished()
        return gone or None, brought or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Any:
        return self._worker.take_told() if self._worker is not None else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def identity_of(vllm_config: Any, model: str) -> bytes:
    """What makes the bytes of a block what they are, besides its tokens, adapter and salt."""
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
