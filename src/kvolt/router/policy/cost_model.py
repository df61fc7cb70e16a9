"""Prices: what a prompt takes at each of many workers, by the step models that they registered. Pure.

Each coefficient is an array over workers, so that a decision costs the same whether all workers are alike or none.
There are two shapes of model; a worker is of one of them. One that registered none is taken for an 8B model on a
large GPU.

What is said here in numpy `_cost_model_native.c` does in one pass, where it was built and all workers are of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvolt.core.card import EngineInfo
from kvolt.core.latency import Floats, LatencyModel, OccupancyModel

if TYPE_CHECKING:
    native_look: Callable[..., None] | None
else:
    try:
        from kvolt.router.policy._cost_model_native import price as native_look
    except ImportError:
        native_look = None

GUESS = LatencyModel(base_s=6e-3, prefill_token_s=50e-6, batch_s=50e-6, context_token_s=20e-9)
"""Of a worker that did not say."""

_UNCHUNKED = 1 << 40
"""The tokens of a step where the worker did not say: more than any prompt has."""

Indexes = npt.NDArray[np.intp]


class Asked(NamedTuple):
    """A prompt, and how much of it each worker holds."""

    prompt_tokens: int
    block_size: int
    output_tokens: float
    """Steps of the answer beside others."""
    overlap: Floats
    """In blocks."""
    joined: Floats
    """KV tokens that a decode step reads more with its answer in it."""


class Prices:
    """See the module; elements in the order of `infos`."""

    def __init__(self, infos: Sequence[EngineInfo | None]) -> None:
        self._num_workers = len(infos)
        self.is_told = [info is not None and info.step_model is not None for info in infos]
        """Whether a worker has said how long its steps take."""
        chunks = np.array([_chunk(info) for info in infos], dtype=float)
        linear: dict[int, LatencyModel] = {}
        occupancy: dict[int, OccupancyModel] = {}
        for index, info in enumerate(infos):
            if info is not None and info.latency is None and info.occupancy_latency is not None:
                occupancy[index] = info.occupancy_latency
            else:
                linear[index] = (info.latency if info is not None else None) or GUESS
        unread = [1.0 - _kv_read(info) for info in infos]
        self.unread = np.array(unread) if any(unread) else None
        """Share of a shared block's read that each sequence after the first is spared; None where that is nothing."""
        self._groups: list[tuple[Indexes, _Linear | _Occupancy]] = []
        if linear:
            indexes = np.array(list(linear), dtype=np.intp)
            self._groups.append((indexes, _Linear(list(linear.values()), chunks[indexes])))
        if occupancy:
            indexes = np.array(list(occupancy), dtype=np.intp)
            self._groups.append((indexes, _Occupancy(list(occupancy.values()), chunks[indexes])))

    def look(
        self, asked: Asked, pace: Floats, decoding: Floats, context: Floats, beside: Floats, reading: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """`prefill_s`, beside those that decode now with so much context; and, beside those that share its steps on
        average and read so many KV tokens, the time of a step of its answer and by how much longer all its steps make
        the answer of each of them. All so many times as long as the models say."""
        if native_look is None or len(self._groups) > 1:
            new_tokens = asked.prompt_tokens - asked.overlap * asked.block_size
            prefill_s = self.prefill_s(asked.prompt_tokens, new_tokens, decoding, context)
            step_s = self.decode_s(beside + 1.0, reading + asked.joined)
            more_s = np.maximum(step_s - self.decode_s(beside, reading), 0.0)
            return pace * prefill_s, pace * step_s, pace * more_s * asked.output_tokens
        group = self._groups[0][1]
        out = np.empty((3, self._num_workers))
        native_look(
            isinstance(group, _Occupancy),
            group.columns,
            asked.prompt_tokens,
            asked.output_tokens,
            asked.block_size,
            asked.overlap,
            pace,
            decoding,
            context,
            beside,
            reading,
            asked.joined,
            out,
        )
        return out[0], out[1], out[2]

    def prefill_s(self, prompt_tokens: int, new_tokens: Floats, decoding: Floats, context: Floats) -> Floats:
        """Of which so many must be computed, in chunks as large as the worker's steps are, beside those that decode
        there with so much context. The last token always is."""
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
        """A step of those that decode."""
        if len(self._groups) == 1:
            return self._groups[0][1].decode_s(decoding, context)
        times = np.empty(self._num_workers)
        for indexes, group in self._groups:
            times[indexes] = group.decode_s(decoding[indexes], context[indexes])
        return times

    def parts(self, prompt_tokens: int, output_tokens: float, index: int) -> tuple[float, float]:
        """Of a step of one worker what it takes for none, and for each answer to a prompt like this."""
        nobody = np.zeros(self._num_workers)
        tokens = prompt_tokens + output_tokens / 2.0
        # Of two and one: with none a model may say that nothing is done in no time.
        one_s, two_s = (float(self.decode_s(nobody + n, nobody + n * tokens)[index]) for n in (1.0, 2.0))
        more_s = max(two_s - one_s, 0.0)
        return max(one_s - more_s, 0.0), more_s


class _Linear:
    """Workers with a LatencyModel each."""

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
        """All of it for the native look."""

    def prefill_s(self, prompt_tokens: int, new: Floats, decoding: Floats, held: Floats) -> Floats:
        chunks = new / self._chunks
        full = np.floor(chunks)
        rest = new - full * self._chunks
        # Each chunk reads all before it and itself: what is not new, and of what is new half, and half of itself.
        squares = full * self._chunk_squares + rest * rest
        read = self._context * (new * (prompt_tokens - 0.5 * new) + 0.5 * squares)
        # Those that decode are in every step; but a step that has room takes the next prompt in, too.
        beside = decoding * self._batch + held * self._context_token
        time_s: Floats = np.ceil(chunks) * self._step + new * self._token + read + chunks * beside
        return time_s

    def decode_s(self, decoding: Floats, context: Floats) -> Floats:
        time_s: Floats = self._base + decoding * self._batch + context * self._context_token
        return time_s


class _Occupancy:
    """Workers with an OccupancyModel each."""

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
        """All of it for the native look."""

    def prefill_s(self, prompt_tokens: int, new: Floats, decoding: Floats, held: Floats) -> Floats:
        chunks = new / self._chunks
        full = np.floor(chunks)
        rest = new - full * self._chunks
        squares = full * self._chunk_squares + rest * rest
        beside = (decoding > 0) * self._decode_s(held)
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
