"""CoreCalls: what a NativeEngine does besides its life cycle and requests: KV blocks, adapters, embeddings.

Each is a call to the core. Maps the memory of the blocks; imports torch only if blocks of a device are to be moved
(ADR 12).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

import msgspec

from kvolt.core.block_key import BlockKeyChain, KvLayout
from kvolt.core.errors import EngineFailed, InvalidRequest, KvoltError, NotFound, Unsupported
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import Stored
from kvolt.core.request import Request, Role
from kvolt.engines.contract import AttachedKv, EngineSpec, HeldKv, KvAllocation, Pooling, SealedKv
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.shell import messages
from kvolt.engines.native.shell.link import EngineLink
from kvolt.engines.native.shell.messages import Loaded
from kvolt.transfer.memory.device_memory import DeviceHandle
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.slabs import Slab

log = logging.getLogger(__name__)

"""Bytes of blocks per message; steps continue between messages."""


class CoreCalls:
    """See the module. NativeEngine adds life cycle and requests."""

    def __init__(self, spec: EngineSpec, arguments: NativeArguments, link: EngineLink) -> None:
        self._spec = spec
        self._arguments = arguments
        self._link = link
        self._memories: list[int] = []
        self._slabs: tuple[Slab, ...] = ()
        self._loaded: Loaded | None = None
        self._loras: dict[str, str] = {}
        self._is_over = False

    @property
    def _known(self) -> Loaded:
        if self._loaded is None:
            raise EngineFailed("the native engine has not been started", engine="native")
        return self._loaded

    # --- KvEvents, KvVisible, KvMovable

    async def clear_kv(self) -> int:
        return await self._link.call(messages.CLEAR_KV)

    async def match(self, request: Request) -> int:
        return await self._link.call(messages.MATCH, request)

    async def kv_contents(self) -> tuple[Stored, ...]:
        return await self._link.call(messages.KV_CONTENTS)

    def kv_layout(self) -> KvLayout:
        return self._known.facts.layout

    def kv_keys(self, request: Request) -> tuple[BlockKey, ...]:
        context = self._known.facts.keys
        if request.lora or request.salt:
            digest = self._loras.get(request.lora) if request.lora else None
            if request.lora and digest is None:
                raise InvalidRequest(f"no adapter {request.lora!r} is loaded", param="lora")
            context = msgspec.structs.replace(context, lora=digest, salt=request.salt)
        return tuple(BlockKeyChain(context, request.media).extend(request.token_ids))

    # --- KvAddressable

    @property
    def kv_memories(self) -> tuple[int, ...]:
        """Descriptors of the KV memories, one per rank; empty if the blocks are not in shared host memory."""
        return tuple(self._memories) if all(os.fstat(each).st_size for each in self._memories) else ()

    async def _open_device(self, loaded: Loaded) -> None:
        """Map the blocks of a single device of another process; in a thread, because CUDA initialisation
        takes seconds."""
        facts, arguments = loaded.facts, self._arguments
        handle = facts.device_memory
        if handle is None or arguments.tensor_parallel > 1 or arguments.process == "thread":
            return
        if loaded.info.role not in (Role.PREFILL, Role.DECODE) and not self._spec.has_tiers:
            return  # its blocks are not read, and a CUDA context costs memory
        try:
            slab = await asyncio.to_thread(_open_slab, handle, facts.device, SlabLayout.of_rank(facts.layout))
        except (
            KvoltError,
            ImportError,
            RuntimeError,
        ) as error:  # the engine still computes; prompts are recomputed elsewhere
            log.warning(
                "KV blocks of this device cannot be moved; other workers will recompute them: %s", error
            )
            return
        if self._is_over:
            slab.close()
        else:
            self._slabs = (slab,)

    def kv_slabs(self) -> tuple[Slab, ...]:
        if not self._slabs:
            memories, model = self.kv_memories, self.kv_layout()
            if not memories:
                raise Unsupported(
                    "the KV blocks are not in memory that other processes can map", feature="kv_slabs"
                )
            self._slabs = tuple(
                _map_slab(memory, SlabLayout.of_rank(model, len(memories), rank))
                for rank, memory in enumerate(memories)
            )
        return self._slabs

    async def held_kv(self, request_id: RequestId) -> HeldKv:
        return await self._link.call(messages.HELD_KV, request_id)

    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        return await self._link.call(messages.COMPUTED_KV, request_id, after)

    async def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        is_cancelled, allocation = False, KvAllocation(0, ())

        def on_value(value: KvAllocation) -> None:
            nonlocal allocation
            allocation = value
            if is_cancelled:
                release()

        def release() -> None:
            if allocation.blocks:  # the caller is gone and cannot release it
                self._link.post(messages.COMMIT_KV, allocation, 0, None)

        try:
            return await self._link.call(messages.ALLOCATE_KV, list(keys), list(hashes), on_value=on_value)
        except BaseException:
            is_cancelled = True
            release()  # if the reply arrived in the same loop iteration in which the caller was cancelled
            raise

    async def commit_kv(
        self, allocation: KvAllocation, num_filled: int, keep_for: RequestId | None = None
    ) -> None:
        # Commands keep their order: a request submitted next finds the blocks. Waiting would cost it a step.
        self._link.post(messages.COMMIT_KV, allocation, num_filled, keep_for)

    # --- KvTierable

    async def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        try:
            return await self._link.call(messages.PIN_SEALED, name)
        except asyncio.CancelledError:
            self._link.post(messages.RELEASE_PREFILL, name)
            raise

    async def attach_kv(self, allocation: KvAllocation, num_last: int, request_id: RequestId) -> AttachedKv:
        return await self._link.call(messages.ATTACH_KV, allocation, num_last, request_id)

    # --- Lora, Embed

    async def load_lora(self, name: str, path: str) -> None:
        await self._link.call(messages.LOAD_LORA, name, path)
        self._loras = await self._link.call(messages.LORAS)

    async def unload_lora(self, name: str) -> None:
        digest = self._loras.pop(name, None)  # immediately: requests sent from now on arrive after the unload
        try:
            await self._link.call(messages.UNLOAD_LORA, name)
        except NotFound:
            raise
        except KvoltError:
            if digest is not None:
                self._loras.setdefault(name, digest)
            raise

    def loras(self) -> tuple[str, ...]:
        return tuple(self._loras)

    async def embed(self, inputs: Sequence[Sequence[int]], pooling: Pooling = "mean") -> list[list[float]]:
        return await self._link.call(messages.EMBED, [list(tokens) for tokens in inputs], pooling)


def _map_slab(memory: int, layout: SlabLayout) -> Slab:
    return Slab.mapped(os.dup(memory), os.fstat(memory).st_size, layout.block.block_bytes, layout)


def _open_slab(handle: DeviceHandle, device: str, layout: SlabLayout) -> Slab:
    """The slab of the engine's device, mapped into this process."""
    import torch

    from kvolt.transfer.cuda.memory import open_memory

    memory = open_memory(handle, torch.device(device))
    memory.warm_up()
    return Slab.on_device(memory, layout.block.block_bytes, layout)
