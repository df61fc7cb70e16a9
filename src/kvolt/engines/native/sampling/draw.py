"""Chooses one token per row: the most likely, or one drawn by inverse CDF with one uniform number per row.

Logits become weights: exp((x - max) / temperature), scaled to 2**32 and rounded to integers. Sums of integers below
2**53 are exact in float64 in any order, and all other operations are elementwise, so a row draws the same token alone,
in any batch and with any number of threads.

top_k, top_p and min_p all keep the tokens from some weight on, so each is one threshold per row (tokens with equal
weight are all kept or all dropped) and no sorting is undone: on the host the largest weights of a row are found by
partition; on a device by topk or, if top_k does not bound their number, by a sort. The work on a device does not
depend on results, so it needs no synchronisation.

Order of the filters: top_k, then top_p over the sum of what top_k keeps. min_p is a share of the largest weight and
depends on neither. The largest threshold counts.

A new filter that keeps the tokens from some weight on is a threshold too, the same on the host (`_apply_filters`) and
on a device (`_thresholds`):

- by rank or by the largest weight: before top_p;
- by the sum of the whole row: beside min_p, since it depends on no other filter. The host has the sum (`total`); a
  device computes it;
- by the sum of the kept weights: after top_p.

Any other filter sets weights to 0 after the thresholds: a band that may lack the largest weight could leave no token
beside a threshold. What it compares must not depend on the order of a sum, so it sums integers only.

`_thresholds` returns early, twice, where no row has top_p: a filter that is added below a return has no effect on a
device unless the condition of that return names it. A new filter is also a field of `Draws`, and of the `numbers` that
`draw_on_device` copies.

Knows only numbers; the sampler knows the meaning of rows. Logits are float32 and not modified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 256
_SCALE = 2.0**32
"""Weight of the most likely token."""
MAX_TOPK = 1024
"""Largest top_k for which a device uses topk instead of a sort."""
_HOST_CHUNK = 4
"""Rows processed at a time on the host, so that they stay in the CPU cache."""
_NUCLEUS_SEARCH = 1024
"""Number of largest weights searched for the nucleus (top_p) before sorting the whole row."""

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Draws:
    """Sampling parameters of some rows: arrays with one element per row."""

    uniforms: Floats
    inverse_temperatures: Floats
    top_k: NDArray[np.int64]
    """No limit if it is at least the vocabulary size."""
    top_p: Floats
    min_p: Floats


class Picked(NamedTuple):
    """A token per row, and the row's largest logit, which is finite if the row is valid."""

    tokens: Tensor
    maxima: Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device without synchronisation; on the host, the array itself."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def join_to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    """Concatenate arrays, with one copy on the host, and copy them to the device."""
    if device.type == "cpu":
        return torch.from_numpy(np.concatenate(arrays))
    pinned = torch.from_numpy(np.empty(0, dtype=arrays[0].dtype)).new_empty(
        sum(map(len, arrays)), pin_memory=True
    )
    np.concatenate(arrays, out=pinned.numpy())
    return pinned.to(device, non_blocking=True)


def most_likely(logits: Tensor, rows: NDArray[np.int64] | None) -> Picked:
    """The first most likely token of each row, or of the given rows."""
    if logits.device.type != "cpu":
        chosen = logits if rows is None else logits[to_device(rows, logits.device)]
        maxima, tokens = chosen.max(dim=-1)
        return Picked(tokens, maxima)
    # On a CPU numpy's argmax is about twenty times faster than torch's; both return the first NaN.
    array = logits.numpy()
    if rows is None:
        best = array.argmax(axis=1)
        rows = np.arange(len(best))
    else:
        best = np.array([array[row].argmax() for row in rows], dtype=np.int64)
    return Picked(torch.from_numpy(best), torch.from_numpy(array[rows, best]))


def draw(logits: Tensor, rows: NDArray[np.int64] | None, draws: Draws, filtered: bool) -> Picked:
    """Draw a token for each row, or for the given rows. top_k, top_p and min_p apply only with `filtered`."""
    if logits.device.type == "cpu":
        return draw_on_host(logits, rows, draws, filtered)
    chosen = logits if rows is None else logits[to_device(rows, logits.device)]
    return draw_on_device(chosen, draws, filtered)


def _weights(differences: Tensor, inverse: Tensor | None) -> Tensor:
    """Weights from differences to the largest logit, in place. `inverse` is None if all temperatures are 1."""
    if inverse is not None:
        differences.mul_(inverse)
    return differences.exp_().mul_(_SCALE).round_()


# --- on the host ---


def draw_on_host(logits: Tensor, rows: NDArray[np.int64] | None, draws: Draws, filtered: bool) -> Picked:
    """Draw on the host, a few rows at a time."""
    num_rows = logits.shape[0] if rows is None else len(rows)
    where = np.arange(num_rows) if rows is None else rows
    padded = -(-logits.shape[1] // _BLOCK) * _BLOCK
    scratch = torch.full((min(num_rows, _HOST_CHUNK), padded), -math.inf)
    inverse = _inverse(draws)
    tokens = np.zeros(num_rows, dtype=np.int64)
    maxima = torch.empty(num_rows, dtype=torch.float32)
    for start, end in pairwise([*range(0, num_rows, _HOST_CHUNK), num_rows]):
        chunk = _rows_of(logits, where[start:end])
        part = None if inverse is None else inverse[start:end]
        largest = chunk.amax(dim=-1, keepdim=True)
        maxima[start:end] = largest.squeeze(1)
        scratch[:, logits.shape[1] :] = -math.inf  # padding to whole blocks, with weight 0
        torch.sub(chunk, largest, out=scratch[: end - start, : logits.shape[1]])
        weights = _weights(scratch[: end - start], part)
        sums = _block_sums(weights)
        if filtered:
            for at in range(start, end):
                _apply_filters(weights[at - start], float(sums[at - start].sum()), draws, at)
            sums = _block_sums(weights)
        array = weights.numpy()
        for at in range(start, end):
            tokens[at] = _find(array[at - start], sums[at - start], draws.uniforms[at])
    return Picked(torch.from_numpy(tokens), maxima)


def _inverse(draws: Draws) -> Tensor | None:
    if bool((draws.inverse_temperatures == 1).all()):
        return None
    return torch.from_numpy(draws.inverse_temperatures.astype(np.float32)).unsqueeze(1)


def _block_sums(weights: Tensor) -> Floats:
    sums: Floats = weights.view(len(weights), -1, _BLOCK).sum(dim=-1, dtype=torch.float64).numpy()
    return sums


def _rows_of(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return logits[first : last + 1]  # rows are in order
    return logits.index_select(0, torch.from_numpy(rows))


def _find(weights: NDArray[np.float32], sums: Floats, uniform: float) -> int:
    """The first token at which the running sum exceeds the number's share of the total."""
    running = sums.cumsum()
    total = running[-1]
    if not total > 0:
        return 0  # NaN: the maximum is not finite, which marks the row as failed
    target = min(math.floor(uniform * total), total - 1)
    block = int(running.searchsorted(target, side="right"))
    before = running[block] - sums[block]
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    return block * _BLOCK + int(inside.searchsorted(target - before, side="right"))


def _apply_filters(weights: Tensor, total: float, draws: Draws, at: int) -> None:
    """Set weights to 0 that top_k, top_p and min_p exclude from one row."""
    array = weights.numpy()
    top_k, top_p = int(draws.top_k[at]), float(draws.top_p[at])
    threshold = float(draws.min_p[at]) * _SCALE
    kth = 0.0
    if top_k < len(array):
        kth = float(np.partition(array, len(array) - top_k)[len(array) - top_k])
        threshold = max(threshold, kth)
    if top_p < 1 and kth > 0:
        largest = np.sort(array[array >= kth])[::-1]
        threshold = max(threshold, _nucleus(largest, top_p * float(largest.sum(dtype=np.float64))))
    elif top_p < 1:
        threshold = max(threshold, _nucleus_of_row(array, top_p * total))
    if threshold > 0:
        nearest = np.float32(threshold)
        below = nearest if float(nearest) < threshold else np.nextafter(nearest, np.float32(0))
        torch.threshold_(weights, float(below), 0.0)


def _nucleus_of_row(array: NDArray[np.float32], mass: float) -> float:
    first = len(array) - min(_NUCLEUS_SEARCH, len(array))
    largest = np.sort(np.partition(array, first)[first:])[::-1]
    if not largest.sum(dtype=np.float64) >= mass:
        largest = np.sort(array)[::-1]
    return _nucleus(largest, mass)


def _nucleus(largest: NDArray[np.float32], mass: float) -> float:
    """The smallest weight of the nucleus: the fewest of `largest`, in descending order, whose sum reaches `mass`."""
    running = largest.cumsum(dtype=np.float64)
    return float(largest[min(int(running.searchsorted(mass)), len(largest) - 1)])


# --- on a device ---


def draw_on_device(logits: Tensor, draws: Draws, filtered: bool) -> Picked:
    """Draw on a device, for all rows at once, without reading back."""
    numbers = [draws.uniforms, draws.inverse_temperatures, draws.top_k, draws.top_p, draws.min_p]
    moved = to_device(np.stack(numbers), logits.device).unsqueeze(2)
    maxima = logits.amax(dim=-1, keepdim=True)
    scaled = bool((draws.inverse_temperatures != 1).any())
    weights = _weights(logits - maxima, moved[1].float() if scaled else None)
    if filtered:
        weights.mul_(weights >= _thresholds(weights, draws, moved))
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    total = running[:, -1:]
    target = torch.minimum((moved[0] * total).floor_(), total - 1)
    tokens = torch.searchsorted(running, target, right=True).clamp_(max=logits.shape[1] - 1)
    return Picked(tokens.squeeze(1), maxima.squeeze(1))


def _thresholds(weights: Tensor, draws: Draws, moved: Tensor) -> Tensor:
    """The smallest weight kept per row, [n, 1]."""
    _, _, top_k, top_p, min_p = moved
    least: Tensor = min_p * _SCALE
    vocabulary = weights.shape[1]
    num_largest = int(draws.top_k.max())
    has_nucleus = bool((draws.top_p < 1).any())
    if not has_nucleus and bool((draws.top_k >= vocabulary).all()):
        return least
    if num_largest <= min(MAX_TOPK, vocabulary):
        largest = weights.topk(num_largest, dim=-1).values
    else:
        largest = weights.sort(dim=-1, descending=True).values
    kth = largest.gather(1, top_k.long().clamp_(max=largest.shape[1]) - 1)
    if not has_nucleus:
        return torch.maximum(least, kth)
    mass = top_p * (weights * (weights >= kth)).sum(dim=-1, keepdim=True, dtype=torch.float64)
    place = torch.searchsorted(largest.cumsum(dim=-1, dtype=torch.float64), mass)
    last = largest.gather(1, place.clamp_(max=largest.shape[1] - 1))
    return torch.maximum(least, torch.maximum(kth, last))


# --- uniform numbers ---


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + _GAMMA
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def _words(numbers: Sequence[int]) -> NDArray[np.uint64]:
    return np.array([number & _MASK for number in numbers], dtype=np.uint64)


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> Floats:
    """One number in [0, 1) per row: a pure function of (seed, choice, position). Seeds are taken modulo 2**64.

    So a token does not depend on the other rows of its batch, on preemptions, or on migration to another worker. The
    function is SplitMix64's finalizer, once per argument:

        h = mix(seed + GAMMA);  h = mix((h ^ choice) + GAMMA);  h = mix((h ^ position) + GAMMA)

    and the number is the upper 53 bits of h divided by 2**53. Each step is a bijection of 64-bit integers, so positions
    of one choice never repeat a number. Part of the wire contract between workers that resume each other's requests:
    the test vectors must never change.
    """
    state = _mix(_words(seeds))
    state = _mix(state ^ _words(choices))
    state = _mix(state ^ _words(positions))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sampling_seed(seed: int | None, request_id: str) -> int:
    """The seed of a request; if it has none, one that every worker derives from its id."""
    return xxhash.xxh3_64_intdigest(request_id.encode()) if seed is None else seed
