"""Host process: starts SGLang and relays messages between its schedulers and the engine.

    python -m kvolt.engines.sglang.host.host SOCKET_FD

Ends when a scheduler ends or when the engine closes the socket, and takes all schedulers down with it. Converts
SGLang's messages to plain types and makes no decisions about requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from array import array
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import zmq

from kvolt.core.errors import EngineFailed, KvoltError, to_info
from kvolt.engines.framing import FrameSplitter, encode_frame
from kvolt.engines.sglang.host.launch import Launched, launch
from kvolt.engines.sglang.host.messages import (
    Abort,
    Answer,
    Batch,
    Command,
    Done,
    Fatal,
    Flush,
    Generate,
    LoadLora,
    RankLoad,
    Ready,
    Row,
    Start,
    Stop,
    UnloadLora,
    decode_command,
)
from kvolt.engines.sglang.host.scheduler import read_mark
from kvolt.runtime.clock import SystemClock

_READ_BYTES = 1 << 18
_BAD_REQUEST = 400


class EngineGone(Exception):
    """The engine's end of the socket is closed."""


class ChildFailed(Exception):
    """A scheduler failed, which SGLang signals with SIGQUIT."""


class Pipe:
    """The host's end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._cutter = FrameSplitter()

    def send(self, message: Answer) -> None:
        try:
            self.socket.sendall(encode_frame(message))
        except OSError as error:
            raise EngineGone from error

    def receive(self) -> list[Command]:
        """Received commands; blocks for the first bytes."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except OSError as error:
            raise EngineGone from error
        if not data:
            raise EngineGone
        return [decode_command(each) for each in self._cutter.feed(data)]


@dataclass(slots=True)
class _PendingCall:
    """A call that not all ranks have answered."""

    call: Flush | LoadLora | UnloadLora
    num_left: int
    error: str | None = None


class Host:
    """Event loop between the schedulers and the engine."""

    def __init__(self, pipe: Pipe, launched: Launched) -> None:
        self._pipe = pipe
        self._launched = launched
        self._sockets = launched.sockets
        self._lora_ids = launched.lora_ids
        self._calls: list[_PendingCall] = []
        """Pending calls. Schedulers answer in order, without an id."""
        self._marks: dict[int, int] = {}
        self._rank = 0
        self._is_stopped = False

    def run(self) -> None:
        poller = zmq.Poller()
        pids = {os.pidfd_open(pid): pid for pid in self._launched.pids}
        for each in (self._pipe.socket, self._sockets.tokens, self._sockets.answers, *pids):
            poller.register(each, zmq.POLLIN)
        while not self._is_stopped:
            for ready, _ in poller.poll():
                if ready == self._pipe.socket.fileno():
                    for command in self._pipe.receive():
                        self._handle(command)
                elif ready is self._sockets.tokens:
                    self._drain(self._sockets.tokens)
                elif ready is self._sockets.answers:
                    self._drain(self._sockets.answers)
                else:
                    raise EngineFailed(
                        f"a process of SGLang (pid {pids[int(ready)]}) has ended", engine="sglang"
                    )

    def _drain(self, source: Any) -> None:
        from sglang.srt.managers.io_struct import sock_recv

        while True:
            try:
                message = sock_recv(source, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(message)

    # --- from the schedulers

    def _on_message(self, message: Any) -> None:
        if isinstance(message, int):
            self._rank, number = read_mark(message)
            self._marks[self._rank] = number
            return
        match type(message).__name__:
            case "BatchTokenIDOutput":
                rank = next(iter(message.dp_ranks or ()), None) or 0
                number = self._marks.get(rank, 0)
                self._pipe.send(Batch(rows_of(message), self._loads(), rank, number))
            case "AbortReq":  # aborted before it started
                finish = message.finished_reason or {"type": "abort", "message": message.abort_message}
                self._pipe.send(Batch([Row(message.rid, [], finish)], self._loads()))
            case "FlushCacheReqOutput" | "LoRAUpdateOutput" as name:
                self._on_call_result(name, message)

    def _on_call_result(self, name: str, message: Any) -> None:
        kinds = (Flush,) if name == "FlushCacheReqOutput" else (LoadLora, UnloadLora)
        pending = next((each for each in self._calls if isinstance(each.call, kinds)), None)
        if pending is None:
            return
        pending.num_left -= 1
        if not message.success:
            pending.error = str(
                getattr(message, "message", "") or getattr(message, "error_message", "") or "refused"
            )
        if pending.num_left:
            return
        self._calls.remove(pending)
        call, error = pending.call, pending.error
        if (isinstance(call, LoadLora) and error) or (isinstance(call, UnloadLora) and not error):
            self._lora_ids.pop(call.name, None)
        self._pipe.send(Done(call.call, error))

    def _loads(self) -> list[RankLoad]:
        return [
            RankLoad(each.dp_rank, each.num_running_reqs, each.num_waiting_reqs, each.num_used_tokens)
            for each in self._launched.loads.read_all()
        ]

    # --- from the engine

    def _handle(self, command: Command) -> None:
        from sglang.srt.managers import io_struct

        match command:
            case Generate():
                self._generate(command)
            case Abort(rid):
                self._send(io_struct.AbortReq(rid=rid))
            case Flush(_, timeout_s):
                self._add_call(command)
                self._send(io_struct.FlushCacheReqInput(timeout_s=timeout_s))
            case LoadLora(_, name, path):
                from sglang.srt.lora.lora_registry import LoRARef

                lora = LoRARef(lora_name=name, lora_path=path, pinned=False)
                self._lora_ids[name] = lora.lora_id
                self._add_call(command)
                self._send(
                    io_struct.LoadLoRAAdapterReqInput(lora_name=name, lora_path=path, lora_id=lora.lora_id)
                )
            case UnloadLora(_, name):
                self._add_call(command)
                self._send(
                    io_struct.UnloadLoRAAdapterReqInput(lora_name=name, lora_id=self._lora_ids.get(name))
                )
            case Stop():
                self._is_stopped = True

    def _add_call(self, call: Flush | LoadLora | UnloadLora) -> None:
        self._calls.append(_PendingCall(call, self._launched.facts.num_ranks))

    def _generate(self, command: Generate) -> None:
        """Submit a request as SGLang's TokenizerManager does."""
        try:
            self._send(self._tokenized(command))
        except (ValueError, TypeError, msgspec.ValidationError) as error:
            finish = {"type": "abort", "message": str(error), "status_code": _BAD_REQUEST}
            self._pipe.send(Batch([Row(command.rid, [], finish)]))

    def _tokenized(self, command: Generate) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(**command.sampling)
        sampling.normalize(tokenizer=self)  # only checked for None; the schedulers have the tokenizer
        sampling.verify(self._launched.facts.vocab_size)
        lora = command.fields.get("lora_name")
        request = TokenizedGenerateReqInput(
            rid=command.rid,
            input_text="",
            input_ids=array("q", command.input_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            token_ids_logprob=None,
            lora_id=self._lora_ids.get(lora) if lora else None,
            **command.fields,
        )
        request.time_stats = APIServerReqTimeStats(disagg_mode=self._launched.disaggregation)
        request.time_stats.set_created_time()
        request.wrap_pickle_fields()
        return request

    def _send(self, message: Any) -> None:
        from sglang.srt.managers.io_struct import sock_send

        sock_send(self._sockets.requests, message)


def rows_of(batch: Any) -> list[Row]:
    """Convert a BatchTokenIDOutput."""
    return [
        Row(
            rid,
            list(batch.output_ids[index]),
            batch.finished_reasons[index],
            batch.cached_tokens[index],
            _pairs(batch.output_token_logprobs_val, batch.output_token_logprobs_idx, index),
            _tops(batch.output_top_logprobs_val, batch.output_top_logprobs_idx, index),
            _pairs(batch.input_token_logprobs_val, batch.input_token_logprobs_idx, index) or None,
            _tops(batch.input_top_logprobs_val, batch.input_top_logprobs_idx, index) or None,
        )
        for index, rid in enumerate(batch.rids)
    ]


def _pairs(values: Any, ids: Any, index: int) -> list[Any] | None:
    if not values or values[index] is None:
        return None
    return list(zip(values[index], ids[index], strict=True))


def _tops(values: Any, ids: Any, index: int) -> list[Any] | None:
    if not values or values[index] is None:
        return None
    return [
        None if row is None else list(zip(row, names, strict=True))
        for row, names in zip(values[index], ids[index], strict=True)
    ]


def _on_child_failed(*_: object) -> NoReturn:
    raise ChildFailed


def main(argv: list[str]) -> int:
    pipe = Pipe(socket.socket(fileno=int(argv[0])))
    try:
        _serve(pipe)
    except EngineGone:
        pass
    except ChildFailed:
        error = EngineFailed("a scheduler of SGLang failed, see its output", engine="sglang")
        _send_error(pipe, error)
    except KvoltError as known:
        _send_error(pipe, known)
    except Exception as error:  # report to the engine before this process ends
        logging.getLogger(__name__).exception("SGLang host failed")
        _send_error(pipe, EngineFailed(f"SGLang failed: {type(error).__name__}: {error}", engine="sglang"))
    finally:
        _end_children()
    return 0


def _serve(pipe: Pipe) -> None:
    commands: list[Command] = []
    while not commands:
        commands = pipe.receive()
    start = commands[0]
    assert isinstance(start, Start), start
    logging.basicConfig(level=start.log_level)
    tempfile.tempdir = start.folder  # removed by the engine with all files that SGLang leaves
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the worker, which ends this process
    launched = launch(start, SystemClock())
    signal.signal(signal.SIGQUIT, _on_child_failed)
    pipe.send(Ready(launched.facts))
    try:
        Host(pipe, launched).run()
    finally:
        with contextlib.suppress(OSError, AttributeError):
            os.unlink(launched.loads.path)  # SGLang removes it only at its next start


def _send_error(pipe: Pipe, error: KvoltError) -> None:
    with contextlib.suppress(EngineGone):
        pipe.send(Fatal(to_info(error)))


def _end_children() -> None:
    """Kill the process group, including this process, which leads it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
