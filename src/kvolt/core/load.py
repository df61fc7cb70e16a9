"""Load figures of a worker, and the step log that a latency model is fitted from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvolt.core.errors import InvalidRequest

STEP_LOG_VERSION = 1


class StepStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step in the terms of the model `a + b*prefill + c*prefill*context + d*batch + e*context`."""

    batch: int = 0
    """Sequences that decoded one token."""
    prefill_tokens: int = 0
    """Prompt tokens computed (cached ones do not count)."""
    prefill_context: int = 0
    """Sum over prefilled chunks of chunk tokens x tokens before and in the chunk."""
    context_tokens: int = 0
    """KV tokens read by the decoding sequences."""
    time_s: float = 0.0
    shared_tokens: int = 0
    """Of `context_tokens`, those in blocks that an earlier decoding sequence of the step reads too."""


class WorkerLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker is busy with now; published at most every 100 ms while it changes."""

    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    dp_rank: int = 0
    step: StepStats | None = None
    """The latest step, when there was one since the last report."""


class StepLogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a step log: what the figures were measured on."""

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
    """The log as JSON lines, header first."""
    yield _encoder.encode(header) + b"\n"
    for step in steps:
        yield _encoder.encode(step) + b"\n"


def encode_step(step: StepStats) -> bytes:
    """One more line of a log."""
    return _encoder.encode(step) + b"\n"


def _checked(step: StepStats) -> StepStats:
    for name in step.__struct_fields__:
        if getattr(step, name) < 0:
            raise msgspec.ValidationError(f"{name} is {getattr(step, name)}: it must not be negative")
    return step


def decode_step_log(lines: Iterable[bytes]) -> tuple[StepLogHeader, list[StepStats]]:
    """Header and steps; InvalidRequest names the line that is wrong."""
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
            f"step log version {header.version} is not {STEP_LOG_VERSION}", param="step_log", line=1
        )
    return header, steps


class LoadReport(msgspec.Struct, frozen=True):
    """What a worker publishes under LOAD_TOPIC."""

    instance: str
    load: WorkerLoad
