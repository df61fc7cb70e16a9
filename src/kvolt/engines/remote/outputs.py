"""Conversion of a server's output to step outputs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from kvolt.core.delta import StepOutput
from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import SequenceHash
from kvolt.core.request import Request
from kvolt.engines.external.answers import ChoiceOutput


def merge_outputs(first: ChoiceOutput, second: ChoiceOutput) -> ChoiceOutput:
    """Merge two consecutive outputs of one choice."""
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = (logprobs or ()) + second.logprobs
    return ChoiceOutput(
        token_ids=first.token_ids + second.token_ids,
        finish=second.finish,
        stop_reason=second.stop_reason,
        logprobs=logprobs,
        cached_tokens=first.cached_tokens if second.cached_tokens is None else second.cached_tokens,
    )


def without_cached_tokens(step: StepOutput) -> StepOutput:
    """Remove `cached_tokens`, for a server that does not report them: 0 would mean that nothing was cached."""
    if all(delta.cached_tokens is None for _, delta in step.deltas):
        return step
    deltas = tuple((request_id, replace(delta, cached_tokens=None)) for request_id, delta in step.deltas)
    return replace(step, deltas=deltas)


def held_tokens(request: Request, held: Collection[int], block_size: int) -> int:
    """Number of leading prompt tokens in blocks that the server holds."""
    if not held:
        return 0
    names: Sequence[SequenceHash] = request.sequence_hashes
    if request.block_size != block_size or not names:
        hasher = SequenceHasher(block_size, request_seed(request.lora, request.salt))
        names = hasher.extend(request.token_ids)
    num_held = next((index for index, name in enumerate(names) if name not in held), len(names))
    return num_held * block_size
