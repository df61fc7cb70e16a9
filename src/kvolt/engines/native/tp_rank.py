"""The other ranks of tensor parallelism: processes that run every batch their leader runs.

The leader sends what to do over a pipe, in order; a follower does it and answers nothing, since the sums inside
a forward pass keep all in step. A follower ends when its pipe does, so a leader that dies takes them along.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

import msgspec
import numpy as np
import torch

from kvolt.core.errors import EngineFailed, KvoltError
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.batch import Batch
from kvolt.engines.native.parallel import TorchGroup

_STOP_S = 5.0
_LOOK_S, _MAX_LOOKS = 0.2, 600
"""For a rank to start: importing torch takes seconds, many on a busy machine."""


class SentBatch(msgspec.Struct, array_like=True, tag=True):
    """A Batch as bytes: what a forward pass reads of it."""

    token_ids: bytes
    positions: bytes
    slots: bytes
    num_decodes: int
    query_starts: list[int]
    context_lens: list[int]
    block_tables: bytes
    lora_rows: list[tuple[str, int, int]]

    @classmethod
    def of(cls, batch: Batch) -> SentBatch:
        def raw(tensor: torch.Tensor) -> bytes:
            return tensor.cpu().numpy().tobytes()

        return cls(
            raw(batch.token_ids),
            raw(batch.positions),
            raw(batch.slots),
            batch.num_decodes,
            batch.query_starts,
            batch.context_lens,
            raw(batch.block_tables),
            batch.lora_rows,
        )

    def batch(self, device: torch.device) -> Batch:
        def ints(data: bytes, kind: type[np.int64] | type[np.int32]) -> torch.Tensor:
            return torch.from_numpy(np.frombuffer(data, dtype=kind).copy()).to(device)

        return Batch(
            token_ids=ints(self.token_ids, np.int64),
            positions=ints(self.positions, np.int64),
            slots=ints(self.slots, np.int64),
            num_decodes=self.num_decodes,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            context_lens_t=torch.tensor(self.context_lens, dtype=torch.int32, device=device),
            block_tables=ints(self.block_tables, np.int32).view(len(self.context_lens), -1),
            logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
            lora_rows=self.lora_rows,
        )


class Allocate(msgspec.Struct, array_like=True, tag=True):
    """How many KV blocks every rank has: the leader decides."""

    num_blocks: int
    has_memory: bool
    """Whether the descriptor of the memory that they are to lie in comes next; else a rank has its own."""


class LoadLora(msgspec.Struct, array_like=True, tag=True):
    name: str
    path: str


class UnloadLora(msgspec.Struct, array_like=True, tag=True):
    name: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SentBatch | Allocate | LoadLora | UnloadLora).decode


@dataclass(frozen=True, slots=True)
class _Start:
    """What a follower is started with."""

    spec: EngineSpec
    arguments: NativeArguments
    path: str
    rank: int
    address: str


class Followers:
    """The leader's side: starts ranks 1 and up, tells them what to run."""

    def __init__(self, spec: EngineSpec, arguments: NativeArguments, path: Path) -> None:
        self.address = f"tcp://127.0.0.1:{_free_port()}"
        context = multiprocessing.get_context("spawn")
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(1, arguments.tensor_parallel):
            ours, theirs = context.Pipe()
            start = _Start(spec, arguments, str(path), rank, self.address)
            process = context.Process(target=_follow, args=(start, theirs), name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def wait_started(self) -> None:
        """Until each is about to join the group: joining waits for all of them, and would wait for one that is gone."""
        for process, pipe in self._ranks:
            for _ in range(_MAX_LOOKS):
                if pipe.poll(_LOOK_S) or not process.is_alive():
                    break
            if not pipe.poll():
                raise EngineFailed(f"{process.name} did not start", engine="native")
            try:
                trouble = pipe.recv_bytes().decode()
            except EOFError:
                trouble = "it ended while it started"
            if trouble:
                raise EngineFailed(f"{process.name} did not start: {trouble}", engine="native")

    def allocate(self, num_blocks: int, memories: Sequence[int]) -> None:
        """`memories`: descriptors of the ranks' memories from rank 1 on, or none. They may be closed afterwards."""
        self.tell(Allocate(num_blocks, bool(memories)))
        for (process, pipe), memory in zip(self._ranks, memories, strict=bool(memories)):
            with _while_it_lives(process):
                send_handle(pipe, memory, process.pid)

    def tell(self, message: Allocate | LoadLora | UnloadLora | SentBatch) -> None:
        data = _encode(message)
        for process, pipe in self._ranks:
            with _while_it_lives(process):
                pipe.send_bytes(data)

    def run(self, batch: Batch) -> None:
        self.tell(SentBatch.of(batch))

    def close(self) -> None:
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(_STOP_S)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def _while_it_lives(process: BaseProcess) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineFailed(f"{process.name} has ended", engine="native") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _follow(start: _Start, pipe: Connection) -> None:
    from kvolt.engines.native.loading import follower_runner
    from kvolt.engines.native.setup import choose_setup
    from kvolt.models.checkpoint import open_checkpoint

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the leader's end ends us
    try:
        checkpoint = open_checkpoint(Path(start.path), start.arguments.context_length)
        setup = choose_setup(start.spec, start.arguments, checkpoint.config, start.rank)
    except KvoltError as error:
        pipe.send_bytes(error.message.encode())
        return
    pipe.send_bytes(b"")
    group = TorchGroup(start.rank, start.arguments.tensor_parallel, start.address, setup.device)
    with contextlib.suppress(EOFError, OSError):
        first = _decode(pipe.recv_bytes())
        assert isinstance(first, Allocate), first
        memory = recv_handle(pipe) if first.has_memory else None
        runner = follower_runner(checkpoint, start.arguments, setup, group, first.num_blocks, memory)
        while True:
            message = _decode(pipe.recv_bytes())
            if isinstance(message, SentBatch):
                with torch.inference_mode():
                    runner.forward(message.batch(setup.device))
            elif isinstance(message, LoadLora):
                runner.model.adapters.load(message.name, Path(message.path))
            elif isinstance(message, UnloadLora):
                runner.model.adapters.unload(message.name)
    # The other ranks may be gone in the middle of a sum; an orderly goodbye would wait for them.
    os._exit(0)
