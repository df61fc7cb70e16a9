"""CostModel: predicted prefill and step times of a prompt at each of many workers. Pure.

Each coefficient is an array over workers, so that a decision costs the same whether workers differ or not. There are
two kinds of step model; each worker uses one. A worker without a registered model counts as an 8B model on a large GPU.

`_cost_model_native.c` computes the same in one pass if it was built and all workers use one kind of model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvolt.core.card import EngineInfo
from kvolt.core.latency import LatencyModel, OccupancyModel

if TYPE_CHECKING:
    native_predict: Callable[..., None] | None
else:
    try:
        from kvolt.router.policy._cost_model_native import predict as native_predict
    except ImportError:
        native_predict = None

DEFAULT_LATENCY = LatencyModel(base_s=6e-3, prefill_token_s=50e-6, batch_s=50e-6, context_token_s=20e-9)
"""For workers without a registered model."""

_UNCHUNKED = 1 << 40
"""Chunk size of workers that registered none: larger than any prompt."""

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.intp]


class CostInputs(NamedTuple):
    """A prompt, and how much of it each worker holds."""

    prompt_tokens: int
    block_size: int
    shared_steps: float
    """Decode steps shared with other requests."""
    overlap_blocks: Floats
    """Cached blocks by worker."""
    added_context: Floats
    """KV tokens that the answer adds to each decode step."""


class CostModel:
    """See the module. Arrays are in the order of `infos`."""

    def __init__(self, infos: Sequence[EngineInfo | None]) -> None:
        self._num_workers = len(infos)
        self.has_own_model = [info is not None and info.step_model is not None for info in infos]
        """Whether the worker registered a step model."""
        chunks = np.array([_chunk(info) for info in infos], dtype=float)
        linear: dict[int, LatencyModel] = {}
        occupancy: dict[int, OccupancyModel] = {}
        for index, info in enumerate(infos):
            if info is not None and info.latency is None and info.occupancy_latency is not None:
                occupancy[index] = info.occupancy_latency
            else:
                linear[index] = (info.latency if info is not None else None) or DEFAULT_LATENCY
        shared_read_savings = [1.0 - _kv_read(info) for info in infos]
        self.shared_read_savings = np.array(shared_read_savings) if any(shared_read_savings) else None
        """Share of a shared block's read that each sequence after the first saves; None if all are 0."""
        self._groups: list[tuple[Indexes, _Linear | _Occupancy]] = []
        if linear:
            indexes = np.array(list(linear), dtype=np.intp)
            self._groups.append((indexes, _Linear(list(linear.values()), chunks[indexes])))
        if occupancy:
            indexes = np.array(list(occupancy), dtype=np.intp)
            self._groups.append((indexes, _Occupancy(list(occupancy.values()), chunks[indexes])))

    def predict(
        self,
        inputs: CostInputs,
        pace: Floats,
        decoding: Floats,
        context: Floats,
        beside: Floats,
        reading: Floats,
    ) -> tuple[Floats, Floats, Floats]:
        """Prefill time, step time of the answer, and slowdown of each other request over the answer's shared
        steps.

        Prefill runs beside `decoding` requests with `context` tokens; the answer beside `beside` requests that read
        `reading` tokens. All times are multiplied by `pace`.
        """
        if native_predict is None or len(self._groups) > 1:
            new_tokens = inputs.prompt_tokens - inputs.overlap_blocks * inputs.block_size
            prefill_s = self.prefill_s(inputs.prompt_tokens, new_tokens, decoding, context)
            step_s = self.decode_s(beside + 1.0, reading + inputs.added_context)
            added_s = np.maximum(step_s - self.decode_s(beside, reading), 0.0)
            return pace * prefill_s, pace * step_s, pace * added_s * inputs.shared_steps
        group = self._groups[0][1]
        out = np.empty((3, self._num_workers))
        native_predict(
            isinstance(group, _Occupancy),
            group.columns,
            inputs.prompt_tokens,
            inputs.shared_steps,
            inputs.block_size,
            inputs.overlap_blocks,
            pace,
            decoding,
            context,
            beside,
            reading,
            inputs.added_context,
            out,
        )
        return out[0], out[1], out[2]

    def prefill_s(self, prompt_tokens: int, new_tokens: Floats, decoding: Floats, context: Floats) -> Floats:
        """Time to compute `new_tokens` of a prompt in chunks of the worker's batch size, beside decoding
        requests. At least the last token is computed."""
        new_tokens = np.maximum(new_tokens, 1.0)
        if len(self._groups) == 1:
            return self._groups[0][1].prefill_s(prompt_tokens, new_tokens, decoding, context)
        times = np.empty(self._num_workers)
        for indexes, group in self._groups:
            times[indexes] = group.prefill_s(
                prompt_tokens, new_tokens[indexes], decoding[indexes], context[indexes]
            )
        return times

    def decode_s(self, decoding: Floats, context: Floats) -> Floats:
        """Time of a decode step."""
        if len(self._groups) == 1:
            return self._groups[0][1].decode_s(decoding, context)
        times = np.empty(self._num_workers)
        for indexes, group in self._groups:
            times[indexes] = group.decode_s(decoding[indexes], context[indexes])
        return times

    def step_parts(self, prompt_tokens: int, output_tokens: float, index: int) -> tuple[float, float]:
        """Step time of one worker without requests, and per request with a prompt like this."""
        zeros = np.zeros(self._num_workers)
        tokens = prompt_tokens + output_tokens / 2.0
        # Extrapolated from one and two requests: some models predict no time for an empty step.
        one_s, two_s = (float(self.decode_s(zeros + n, zeros + n * tokens)[index]) for n in (1.0, 2.0))
        added_s = max(two_s - one_s, 0.0)
        return max(one_s - added_s, 0.0), added_s


class _Linear:
    """Workers with a LatencyModel."""

    def __init__(self, models: Sequence[LatencyModel], chunks: Floats) -> None:
        self._chunks = chunks
        self._chunk_squares = chunks * chunks
        self._step = _array([model.base_s + model.prefill_step_s for model in models])
        self._base = _array([model.base_s for model in models])
        self._token = _array([model.prefill_token_s for model in models])
        self._context = _array([model.prefill_context_s for model in models])
        self._context_token = _array([model.context_token_s for model in models])
        self._batch = _array([model.batch_s for model in models])
        self.columns = np.stack(
            [chunks, self._step, self._token, self._context, self._batch, self._context_token, self._base]
        )
        """All coefficients, for the native function."""

    def prefill_s(self, prompt_tokens: int, new: Floats, decoding: Floats, context: Floats) -> Floats:
        chunks = new / self._chunks
        full = np.floor(chunks)
        rest = new - full * self._chunks
        # Each chunk attends to all tokens before it and to itself: cached tokens, half of the new ones, half of itself.
        squares = full * self._chunk_squares + rest * rest
        read = self._context * (new * (prompt_tokens - 0.5 * new) + 0.5 * squares)
        # Decoding requests are in every step; a step with free capacity also starts the next prompt.
        beside = decoding * self._batch + context * self._context_token
        time_s: Floats = np.ceil(chunks) * self._step + new * self._token + read + chunks * beside
        return time_s

    def decode_s(self, decoding: Floats, context: Floats) -> Floats:
        time_s: Floats = self._base + decoding * self._batch + context * self._context_token
        return time_s


class _Occupancy:
    """Workers with an OccupancyModel."""

    def __init__(self, models: Sequence[OccupancyModel], chunks: Floats) -> None:
        self._chunks = chunks
        self._chunk_squares = chunks * chunks
        self._step = _array([model.prefill_base_s for model in models])
        self._token = _array([model.prefill_token_s for model in models])
        self._square = _array([model.prefill_square_s for model in models])
        self._base = _array([model.decode_base_s for model in models])
        self._share = _array([model.decode_share_s for model in models])
        self._share_square = _array([model.decode_square_s for model in models])
        self._least = _array([model.decode_least_s for model in models])
        self._kv_tokens = _array([model.kv_tokens for model in models])
        decode = [self._base, self._share, self._share_square, self._least, self._kv_tokens]
        self.columns = np.stack([chunks, self._step, self._token, self._square, *decode])
        """All coefficients, for the native function."""

    def prefill_s(self, prompt_tokens: int, new: Floats, decoding: Floats, context: Floats) -> Floats:
        chunks = new / self._chunks
        full = np.floor(chunks)
        rest = new - full * self._chunks
        squares = full * self._chunk_squares + rest * rest
        beside = (decoding > 0) * self._decode_s(context)
        time_s: Floats = np.ceil(chunks) * self._step + new * self._token + squares * self._square
        return time_s + chunks * beside

    def decode_s(self, decoding: Floats, context: Floats) -> Floats:
        return self._decode_s(context)

    def _decode_s(self, context: Floats) -> Floats:
        share = np.minimum(context / self._kv_tokens, 1.0)
        time_s: Floats = self._base + (self._share + self._share_square * share) * share
        return np.maximum(time_s, self._least)


def _array(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)


def _chunk(info: EngineInfo | None) -> int:
    return max(info.capacity.max_batch_tokens, 1) if info is not None else _UNCHUNKED


def _kv_read(info: EngineInfo | None) -> float:
    model = None if info is None else info.latency or info.occupancy_latency
    return 1.0 if model is None else model.shared_kv_read
