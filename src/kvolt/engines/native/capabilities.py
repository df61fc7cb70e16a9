"""What the native engine offers beyond generating: its blocks, prompts for others, adapters, embeddings.

Works on an EngineCore between its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvolt.core.errors import ErrorInfo, InvalidRequest, KvoltError, Overloaded, Unsupported
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_block import KvBlock, KvLayout
from kvolt.core.kv_events import Stored
from kvolt.core.request import Request
from kvolt.engines.contract import KvHeld, KvRoom, KvTaken, Pooling, SealedKv
from kvolt.engines.kv_exchange import BlockMemory, KvExchange
from kvolt.engines.native.batch import Batch
from kvolt.engines.native.slab import LAYOUT
from kvolt.engines.prefills import HOLD_S, Done, Prefills, Told
from kvolt.kv import BlockId
from kvolt.scheduler.step_plan import Advanced

if TYPE_CHECKING:
    from kvolt.engines.native.core import EngineCore


class Capabilities:
    """See the module."""

    def __init__(self, core: EngineCore, blocks: BlockMemory | None, now: Callable[[], float]) -> None:
        """`blocks`: with all heads in them, or None where no rank reaches those of the others. `now`: any clock that
        does not go back."""
        self._core = core
        self._has_blocks = blocks is not None
        memory = blocks or core.runner.slab
        self._exchange = KvExchange(core.scheduler, memory, self.kv_layout().block_bytes)
        self._prefills = Prefills(core.scheduler, core.abort, now, HOLD_S)

    # --- blocks

    def clear_kv(self) -> int:
        return self._core.scheduler.clear()

    def match(self, request: Request) -> int:
        return self._exchange.match(request)

    def kv_contents(self) -> tuple[Stored, ...]:
        return self._exchange.contents()

    def kv_layout(self) -> KvLayout:
        """Of whole blocks: each rank has its share of the heads."""
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

    def export_kv(self, keys: Sequence[BlockKey]) -> tuple[KvBlock, ...]:
        self._need_blocks()
        return self._exchange.export_kv(keys)

    def import_kv(self, blocks: Sequence[KvBlock]) -> int:
        self._need_blocks()
        return self._exchange.import_kv(blocks)

    def hold_kv(self, request_id: RequestId) -> KvHeld:
        self._need_blocks()
        return self._exchange.hold(request_id)

    def computed_kv(self, request_id: RequestId, after: int, done: Told) -> None:
        """`done` is called in a later step, or when the prompt is let go."""
        self._need_blocks()
        self._prefills.watch(request_id, after, done)

    def tell_computed(self) -> None:
        """Those who wait for blocks, of what is complete now."""
        if self._prefills.is_watched:
            self._core.runner.wait()
            self._prefills.tell()

    def make_room(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvRoom:
        self._need_blocks()
        # Blocks of a request that was stopped are free while its last chunk may still be written on a device.
        self._core.runner.wait()
        return self._exchange.make_room(keys, hashes)

    def settle_kv(self, room: KvRoom, num_filled: int, keep_for: RequestId | None = None) -> None:
        self._exchange.settle(room, num_filled, keep_for, self._prefills.expires_at)

    def take_kv(self, room: KvRoom, num_last: int, request_id: RequestId) -> KvTaken:
        return self._exchange.take(room, num_last, request_id)

    def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        self._need_blocks()
        self._core.runner.wait()  # on a device a block that is named may still be written
        found = self._exchange.pin_sealed(name, self._prefills.hold_s)
        if found:
            self._prefills.hold(name)
        return found

    def _need_blocks(self) -> None:
        if not self._has_blocks:
            raise Unsupported(
                "the KV of several ranks travels from shared memory of the host only: serve with "
                "tensor_parallel = 1, or as aggregated",
                feature="kv of tensor parallelism",
            )

    # --- prompts for others

    def prefill(self, request: Request, done: Done) -> None:
        """Compute a prompt and sample its first tokens; `done` is called in a later step. Errors as of submit."""
        self._prefills.start(request, lambda short: self._core.submit(short, keep_blocks=True), done)

    def release_prefill(self, request_id: RequestId) -> None:
        self._prefills.release(request_id)

    def take(self, one: Advanced) -> bool:
        return self._prefills.take(one)

    def fail(self, request_id: RequestId, error: ErrorInfo) -> bool:
        return self._prefills.fail(request_id, error)

    def expire(self) -> None:
        self._prefills.expire()

    @property
    def next_expiry(self) -> float | None:
        return self._prefills.next_expiry

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
        """Names and digests, in order of loading."""
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
        block_size = scheduler.limits.block_size
        blocks = scheduler.allocate(-(-len(tokens) // block_size))
        if blocks is None:
            raise Overloaded(
                "no KV blocks are free for an embedding", queue="kv_blocks", limit=scheduler.pool.num_blocks
            )
        try:
            total: torch.Tensor | None = None
            for start in range(0, len(tokens), scheduler.limits.max_batch_tokens):
                end = min(start + scheduler.limits.max_batch_tokens, len(tokens))
                hidden = runner.forward(_chunk(tokens, blocks, start, end, block_size, runner.device)).float()
                part = hidden.sum(dim=0) if pooling == "mean" else hidden[-1]
                total = part if total is None or pooling == "last" else total + part
        finally:
            scheduler.pool.release(reversed(blocks))
        assert total is not None
        vector: list[float] = torch.nn.functional.normalize(total, dim=0).tolist()
        return vector


def _chunk(
    tokens: Sequence[int], blocks: list[BlockId], start: int, end: int, block_size: int, device: torch.device
) -> Batch:
    """Tokens [start, end) of one sequence as a batch by themselves."""
    positions = np.arange(start, end, dtype=np.int64)
    table = np.array(blocks, dtype=np.int32)
    slots = table[positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Batch(
        token_ids=torch.tensor(tokens[start:end], dtype=torch.int64, device=device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        num_decodes=0,
        query_starts=[0, end - start],
        context_lens=[end],
        context_lens_t=torch.tensor([end], dtype=torch.int32, device=device),
        block_tables=torch.from_numpy(table[None]).to(device),
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
    )
