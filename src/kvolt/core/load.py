"""Load statistics of a worker, and the step log from which a latency model is fitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from kvolt.core.errors import InvalidRequest

STEP_LOG_VERSION = 1


class StepStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Statistics of one engine step: the inputs of a latency model and the measured time."""

    batch: int = 0
    """Sequences that decoded one token."""
    prefill_tokens: int = 0
    """Prompt tokens computed (cached tokens excluded)."""
    prefill_context: int = 0
    """Sum over prefill chunks of chunk tokens x tokens up to the end of the chunk."""
    context_tokens: int = 0
    """KV tokens read by the decoding sequences."""
    time_s: float = 0.0
    shared_tokens: int = 0
    """Part of `context_tokens` in blocks that an earlier sequence of the step also reads."""


class WorkerLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """Current load of a worker; published at most every 100 ms while it changes."""

    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    dp_rank: int = 0
    step: StepStats | None = None
    """Latest step since the previous report, if any."""

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks that requests hold."""
        return self.kv_used_blocks / self.kv_total_blocks if self.kv_total_blocks else 0.0


class StepLogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a step log: the engine, model and device measured."""

    version: int = STEP_LOG_VERSION
    engine: str
    model: str
    device: str
    block_size: int
    dtype: str = ""


_encoder = msgspec.json.Encoder()
_header_decoder = msgspec.json.Decoder(StepLogHeader)
_step_decoder = msgspec.json.Decoder(StepStats)


def encode_step_log(header: StepLogHeader, steps: Iterable[StepStats]) -> Iterator[bytes]:
    """Encode a step log as JSON lines, header first."""
    yield _encoder.encode(header) + b"\n"
    for step in steps:
        yield _encoder.encode(step) + b"\n"


def encode_step(step: StepStats) -> bytes:
    """Encode one line of a step log."""
    return _encoder.encode(step) + b"\n"


def _checked(step: StepStats) -> StepStats:
    for name in step.__struct_fields__:
        if getattr(step, name) < 0:
            raise msgspec.ValidationError(f"{name} is {getattr(step, name)}, must not be negative")
    return step


def decode_step_log(lines: Iterable[bytes]) -> tuple[StepLogHeader, list[StepStats]]:
    """Decode a step log into header and steps; raises InvalidRequest with the number of an invalid line."""
    header: StepLogHeader | None = None
    steps: list[StepStats] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if header is None:
                header = _header_decoder.decode(line)
            else:
                steps.append(_checked(_step_decoder.decode(line)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"step log line {number}: {error}", param="step_log", line=number) from error
    if header is None:
        raise InvalidRequest("the step log is empty", param="step_log")
    if header.version != STEP_LOG_VERSION:
        raise InvalidRequest(
            f"step log version {header.version} is not supported: this is {STEP_LOG_VERSION}",
            param="step_log",
            line=1,
        )
    return header, steps


class LoadReport(msgspec.Struct, frozen=True):
    """Event published under LOAD_TOPIC."""

    instance: Annotated[str, msgspec.Meta(max_length=256)]
    load: WorkerLoad
