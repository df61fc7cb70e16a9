"""Worker ranks of tensor parallelism: processes that run every batch that rank 0 runs.

Rank 0 sends commands over a pipe, in order; they are not answered, because the sums inside a forward pass keep all
ranks in step. A rank exits when its pipe is closed, so it does not outlive rank 0.
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
from kvolt.engines.native.runner import rank_runner
from kvolt.engines.native.setup import choose_setup
from kvolt.models.checkpoint import open_checkpoint

_STOP_S = 5.0
_POLL_S, _MAX_POLLS = 0.2, 600
"""Start timeout of a rank: importing torch takes seconds, more on a busy machine."""


class SentBatch(msgspec.Struct, array_like=True, tag=True):
    """The serialized part of a Batch that a forward pass reads."""

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
    """Number of KV blocks of every rank, chosen by rank 0."""

    num_blocks: int
    has_memory: bool
    """Whether a descriptor of their memory follows; otherwise the rank allocates it."""


class LoadLora(msgspec.Struct, array_like=True, tag=True):
    name: str
    path: str


class UnloadLora(msgspec.Struct, array_like=True, tag=True):
    name: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SentBatch | Allocate | LoadLora | UnloadLora).decode


@dataclass(frozen=True, slots=True)
class _Start:
    """Arguments of a rank's process."""

    spec: EngineSpec
    arguments: NativeArguments
    path: str
    rank: int
    address: str


class TpRanks:
    """Rank 0's side: starts the other ranks and sends them commands."""

    def __init__(self, spec: EngineSpec, arguments: NativeArguments, path: Path) -> None:
        self.address = f"tcp://127.0.0.1:{_free_port()}"
        context = multiprocessing.get_context("spawn")
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(1, arguments.tensor_parallel):
            pipe, rank_pipe = context.Pipe()
            start = _Start(spec, arguments, str(path), rank, self.address)
            process = context.Process(
                target=_run_rank, args=(start, rank_pipe), name=f"rank-{rank}", daemon=True
            )
            process.start()
            rank_pipe.close()
            self._ranks.append((process, pipe))

    def wait_started(self) -> None:
        """Wait until all ranks are ready to join the group. Joining waits for all ranks, also for one that
        has exited."""
        for process, pipe in self._ranks:
            for _ in range(_MAX_POLLS):
                if pipe.poll(_POLL_S) or not process.is_alive():
                    break
            if not pipe.poll():
                raise EngineFailed(f"{process.name} did not start", engine="native")
            try:
                error = pipe.recv_bytes().decode()
            except EOFError:
                error = "it exited during startup"
            if error:
                raise EngineFailed(f"{process.name} did not start: {error}", engine="native")

    def allocate(self, num_blocks: int, memories: Sequence[int]) -> None:
        """Allocate the KV blocks of all ranks. `memories`: descriptors for the ranks from 1 on, or none; they
        may be closed afterwards."""
        self.send(Allocate(num_blocks, bool(memories)))
        for (process, pipe), memory in zip(self._ranks, memories, strict=bool(memories)):
            with _rank_errors(process):
                send_handle(pipe, memory, process.pid)

    def send(self, message: Allocate | LoadLora | UnloadLora | SentBatch) -> None:
        data = _encode(message)
        for process, pipe in self._ranks:
            with _rank_errors(process):
                pipe.send_bytes(data)

    def run(self, batch: Batch) -> None:
        self.send(SentBatch.of(batch))

    def close(self) -> None:
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(_STOP_S)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def _rank_errors(process: BaseProcess) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineFailed(f"{process.name} has exited", engine="native") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run_rank(start: _Start, pipe: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # exits when rank 0 does
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
        runner = rank_runner(checkpoint, start.arguments, setup, group, first.num_blocks, memory)
        while True:
            message = _decode(pipe.recv_bytes())
            if isinstance(message, SentBatch):
                with torch.inference_mode():
                    runner.forward(message.batch(setup.device))
            elif isinstance(message, LoadLora):
                runner.model.adapters.load(message.name, Path(message.path))
            elif isinstance(message, UnloadLora):
                runner.model.adapters.unload(message.name)
    # Other ranks may have exited during a sum, for which an orderly shutdown would wait.
    os._exit(0)
