"""Capabilities: the native engine's features besides generation: KV blocks, remote prefills, adapters, embeddings.

Called between the steps of an EngineCore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from kvolt.core.block_key import KvLayout
from kvolt.core.errors import InvalidRequest, KvoltError, Overloaded, Unsupported
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import Stored
from kvolt.core.request import Request
from kvolt.engines.contract import AttachedKv, HeldKv, KvAllocation, Pooling, SealedKv
from kvolt.engines.kv_exchange import KvExchange
from kvolt.engines.native.runner import ModelRunner
from kvolt.engines.native.slab import LAYOUT
from kvolt.engines.prefills import HOLD_S, OnBlocks, OnHandoff, Prefills
from kvolt.scheduler.scheduler import Scheduler


class RequestCore(Protocol):
    """The part of EngineCore that the capabilities use."""

    scheduler: Scheduler
    runner: ModelRunner

    def submit(self, request: Request, keep_blocks: bool = False) -> None: ...

    def abort(self, request_id: RequestId) -> None: ...

    def drop_lora(self, name: str) -> None: ...


class Capabilities:
    """See the module."""

    def __init__(self, core: RequestCore, has_blocks: bool, now: Callable[[], float]) -> None:
        """`has_blocks`: other processes can access the blocks of all ranks. `now`: a monotonic clock."""
        self._core = core
        self._has_blocks = has_blocks
        self._exchange = KvExchange(core.scheduler)
        self.prefills = Prefills(core.scheduler, core.abort, now, HOLD_S)

    # --- blocks

    def clear_kv(self) -> int:
        return self._core.scheduler.clear()

    def match(self, request: Request) -> int:
        return self._exchange.match(request)

    def kv_contents(self) -> tuple[Stored, ...]:
        return self._exchange.contents()

    def kv_layout(self) -> KvLayout:
        """Layout of whole blocks; each rank stores its share of the heads."""
        shape, degree = self._core.runner.slab.shape, self._core.runner.model.group.degree
        return KvLayout(
            name=LAYOUT,
            dtype=shape.dtype,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads * degree,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            block_bytes=shape.block_bytes * degree,
        )

    def held_kv(self, request_id: RequestId) -> HeldKv:
        self._need_blocks()
        return self._exchange.held(request_id)

    def computed_kv(self, request_id: RequestId, after: int, on_blocks: OnBlocks) -> None:
        """`on_blocks` is called in a later step, or when the prompt is released."""
        self._need_blocks()
        self.prefills.watch(request_id, after, on_blocks)

    def notify_computed(self) -> None:
        """Report newly completed blocks to their watchers."""
        if self.prefills.has_watchers:
            self._core.runner.wait()
            self.prefills.notify_watchers()

    def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        self._need_blocks()
        # Blocks of an aborted request are free while the device may still write its last chunk.
        self._core.runner.wait()
        return self._exchange.allocate_kv(keys, hashes)

    def commit_kv(self, allocation: KvAllocation, num_filled: int, keep_for: RequestId | None = None) -> None:
        self._exchange.commit(allocation, num_filled, keep_for, self.prefills.expires_at)

    def attach_kv(self, allocation: KvAllocation, num_last: int, request_id: RequestId) -> AttachedKv:
        return self._exchange.attach(allocation, num_last, request_id)

    def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        self._need_blocks()
        self._core.runner.wait()  # the device may still write a block that has a name
        sealed = self._exchange.pin_sealed(name, self.prefills.hold_s)
        if sealed:
            self.prefills.start_hold(name)
        return sealed

    def _need_blocks(self) -> None:
        if not self._has_blocks:
            raise Unsupported(
                "KV of several ranks can be moved only from shared host memory; use tensor_parallel = 1 "
                "or the aggregated role",
                feature="kv of tensor parallelism",
            )

    # --- remote prompts

    def prefill(self, request: Request, on_handoff: OnHandoff) -> None:
        """Compute a prompt and sample its first tokens; `on_handoff` is called in a later step. Same errors
        as `submit`."""
        self.prefills.start(request, lambda short: self._core.submit(short, keep_blocks=True), on_handoff)

    def release_prefill(self, request_id: RequestId) -> None:
        self.prefills.release(request_id)

    # --- adapters

    def load_lora(self, name: str, path: str) -> None:
        try:
            self._core.runner.model.adapters.load(name, Path(path))
        except KvoltError as error:
            raise InvalidRequest(error.message, param="path") from error

    def unload_lora(self, name: str) -> None:
        adapters = self._core.runner.model.adapters
        adapters.digest(name)
        self._core.drop_lora(name)
        adapters.unload(name)

    def loras(self) -> dict[str, str]:
        """Names and digests, in loading order."""
        adapters = self._core.runner.model.adapters
        return {name: adapters.digest(name) for name in adapters.names}

    # --- embeddings

    @torch.inference_mode()
    def embed(self, inputs: Sequence[Sequence[int]], pooling: Pooling = "mean") -> list[list[float]]:
        limits = self._core.scheduler.limits
        vocabulary = self._core.runner.model.config.vocab_size
        for number, tokens in enumerate(inputs):
            if not 0 < len(tokens) <= limits.context_length:
                raise InvalidRequest(
                    f"input {number} has {len(tokens)} tokens; 1 to {limits.context_length} are possible",
                    param="input",
                )
            if not all(0 <= token < vocabulary for token in tokens):
                raise InvalidRequest(f"input {number} has tokens outside the vocabulary", param="input")
        return [self._embed(tokens, pooling) for tokens in inputs]

    def _embed(self, tokens: Sequence[int], pooling: Pooling) -> list[float]:
        scheduler, runner = self._core.scheduler, self._core.runner
        blocks = scheduler.allocate(-(-len(tokens) // scheduler.limits.block_size))
        if blocks is None:
            raise Overloaded(
                "no KV blocks are free for an embedding", queue="kv_blocks", limit=scheduler.pool.num_blocks
            )
        try:
            total: torch.Tensor | None = None
            for start in range(0, len(tokens), scheduler.limits.max_batch_tokens):
                end = start + scheduler.limits.max_batch_tokens
                hidden = runner.forward_chunk(tokens[start:end], start, blocks).float()
                part = hidden.sum(dim=0) if pooling == "mean" else hidden[-1]
                total = part if total is None or pooling == "last" else total + part
        finally:
            scheduler.pool.release(reversed(blocks))
        assert total is not None
        vector: list[float] = torch.nn.functional.normalize(total, dim=0).tolist()
        return vector
