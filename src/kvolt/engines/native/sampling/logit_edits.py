"""Changes logits before sampling: penalties, bias, bans, masks, custom processors.

Only rows with such changes are copied. All indices are collected on the host and copied once, so that the number of
transfers does not depend on the number of rows. Repetition penalty counts prompt and output, presence and frequency
penalty only the output, as in vLLM. Chooses no token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvolt.engines.native.sampling.draw import join_to_device, to_device
from kvolt.engines.native.sampling.processors import LogitsProcessor

Ids = NDArray[np.int32]
_INFINITY = float("inf")


class History:
    """Token counts of a sequence, updated as it grows."""

    __slots__ = ("_counts", "_distinct", "_index_of", "_num_counted", "_seen", "_seen_ids")

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._seen: set[int] | None = None
        self._seen_ids = _GrowingArray()
        self._index_of: dict[int, int] = {}
        self._distinct = _GrowingArray()
        self._counts = _GrowingArray()
        self._num_counted = 0

    def count(self, prompt: Sequence[int], output: Sequence[int], vocabulary: int) -> None:
        """Count the tokens added since the last call; recount if the output is shorter."""
        if len(output) < self._num_counted:
            self._reset()
        if self._seen is None:
            self._seen = {token for token in prompt if token < vocabulary}
            self._seen_ids.extend(self._seen)
        for token in output[self._num_counted :] if self._num_counted else output:
            if token >= vocabulary:
                continue
            if token not in self._seen:
                self._seen.add(token)
                self._seen_ids.append(token)
            index = self._index_of.get(token)
            if index is None:
                self._index_of[token] = len(self._distinct)
                self._distinct.append(token)
                self._counts.append(1)
            else:
                self._counts.values[index] += 1
        self._num_counted = len(output)

    @property
    def seen(self) -> Ids:
        """Distinct tokens of prompt and output."""
        return self._seen_ids.values

    @property
    def generated(self) -> tuple[Ids, Ids]:
        """Distinct tokens of the output, and their counts."""
        return self._distinct.values, self._counts.values


class _GrowingArray:
    """An array with amortised append."""

    __slots__ = ("_array", "_length")

    def __init__(self) -> None:
        self._array = np.empty(64, dtype=np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, number: int) -> None:
        if self._length == len(self._array):
            self._array = np.concatenate([self._array, np.empty(max(64, self._length), dtype=np.int32)])
        self._array[self._length] = number
        self._length += 1

    def extend(self, numbers: Iterable[int]) -> None:
        self._array = np.concatenate([self.values, np.fromiter(numbers, dtype=np.int32)])
        self._length = len(self._array)

    @property
    def values(self) -> Ids:
        return self._array[: self._length]


def pack_ids(ids: Iterable[int], vocabulary: int) -> NDArray[np.int32]:
    """A bitmask, in the form of grammar masks, that allows only these tokens."""
    bits = np.zeros(-(-vocabulary // 32) * 32, dtype=np.uint8)
    bits[[token for token in ids if 0 <= token < vocabulary]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@cache
def _bias_of_byte(device: torch.device) -> Tensor:
    """[256, 8]: the bias, 0 or -inf, of the 8 logits of each possible mask byte."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    with torch.inference_mode(False):
        return torch.from_numpy(np.where(bits == 1, 0, -_INFINITY).astype(np.float32)).to(device)


@dataclass(slots=True)
class Scatter:
    """Values for tokens of some copies; each token at most once per copy."""

    copies: list[int] = field(default_factory=list)
    ids: list[Ids] = field(default_factory=list)
    values: list[NDArray[np.float32]] = field(default_factory=list)
    """One value per id, or one for all ids of a copy."""

    def add(self, copy: int, ids: Ids, values: NDArray[np.float32]) -> None:
        if len(ids):
            self.copies.append(copy)
            self.ids.append(ids)
            self.values.append(values)


class MovedScatter:
    """A Scatter copied to the device."""

    __slots__ = ("_copies", "_ids", "_lengths", "_num_ids", "_values")

    def __init__(self, scatter: Scatter, device: torch.device) -> None:
        lengths = [len(ids) for ids in scatter.ids]
        self._num_ids = sum(lengths)
        self._copies, self._lengths = to_device(np.array([scatter.copies, lengths], dtype=np.int64), device)
        self._ids = join_to_device(scatter.ids, device)
        self._values = join_to_device(scatter.values, device)

    def places(self, vocabulary: int) -> Tensor:
        """Indices into the concatenated copies."""
        return self._ids + self._spread(self._copies * vocabulary)

    @property
    def values(self) -> Tensor:
        if len(self._values) == self._num_ids:
            return self._values
        return self._spread(self._values)

    def _spread(self, by_copy: Tensor) -> Tensor:
        return torch.repeat_interleave(by_copy, self._lengths, output_size=self._num_ids)


class Processed(NamedTuple):
    """A copy with custom processors."""

    copy: int
    processors: Sequence[LogitsProcessor]
    prompt: Sequence[int]
    output: Sequence[int]


@dataclass(slots=True)
class Edits:
    """All changes of one step. `rows` are the copied rows; all other fields refer to copies."""

    vocabulary: int
    rows: list[int] = field(default_factory=list)
    scaled: Scatter = field(default_factory=Scatter)
    """Repetition penalty: positive logits divided by it, others multiplied."""
    added: Scatter = field(default_factory=Scatter)
    """Presence and frequency penalties. Separate from the bias, so that no sum depends on the order of
    additions on a device."""
    biased: Scatter = field(default_factory=Scatter)
    banned: Scatter = field(default_factory=Scatter)
    masks: list[NDArray[np.int32]] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    processed: list[Processed] = field(default_factory=list)

    def mask(self, copy: int, mask: NDArray[np.int32]) -> None:
        """Apply a bitmask to one copy. Tokens beyond the end of the mask are not allowed."""
        words = -(-self.vocabulary // 32)
        if len(mask) != words:
            fitted = np.zeros(words, dtype=np.int32)
            fitted[: min(words, len(mask))] = mask[:words]
            mask = fitted
        self.masks.append(mask)
        self.masked.append(copy)


class MovedEdits:
    """Edits copied to the device."""

    __slots__ = ("_added", "_banned", "_biased", "_edits", "_masks", "_rows", "_scaled")

    def __init__(self, edits: Edits, device: torch.device) -> None:
        self._edits = edits
        self._rows = to_device(np.array(edits.rows, dtype=np.int64), device)
        self._scaled, self._added, self._biased, self._banned = (
            MovedScatter(scatter, device) if scatter.ids else None
            for scatter in (edits.scaled, edits.added, edits.biased, edits.banned)
        )
        self._masks: tuple[Tensor, Tensor] | None = None
        if edits.masks:
            masked = to_device(np.array(edits.masked, dtype=np.int64), device)
            self._masks = masked, join_to_device(edits.masks, device).view(len(masked), -1)

    def apply(self, logits: Tensor) -> tuple[Tensor, dict[int, str]]:
        """Apply the changes; returns the changed copies, and failures of processors by row."""
        copies = logits.index_select(0, self._rows).float()
        flat, vocabulary = copies.view(-1), self._edits.vocabulary
        if self._scaled is not None:
            places, factors = self._scaled.places(vocabulary), self._scaled.values
            now = flat[places]
            flat[places] = torch.where(now > 0, now / factors, now * factors)
        for scatter in (self._added, self._biased):
            if scatter is not None:
                flat.index_add_(0, scatter.places(vocabulary), scatter.values)
        if self._banned is not None:
            flat.index_fill_(0, self._banned.places(vocabulary), -_INFINITY)
        if self._masks is not None:
            self._mask(copies, *self._masks)
        return copies, self._run_processors(copies)

    def _mask(self, copies: Tensor, masked: Tensor, masks: Tensor) -> None:
        table = _bias_of_byte(copies.device)
        if copies.device.type == "cpu":
            for copy, mask in zip(
                masked.tolist(), masks, strict=True
            ):  # one row at a time stays in the CPU cache
                copies[copy] += _bias(table, mask)[: self._edits.vocabulary]
            return
        bias = _bias(table, masks.view(-1)).view(len(masks), -1)
        copies.index_add_(0, masked, bias[:, : self._edits.vocabulary])

    def _run_processors(self, copies: Tensor) -> dict[int, str]:
        failures: dict[int, str] = {}
        for item in self._edits.processed:
            row = copies[item.copy]
            try:
                for processor in item.processors:
                    processor(row, item.prompt, item.output)
            except Exception as error:  # third-party code: may fail its request, but not the step
                name = type(processor).__name__
                failures[self._edits.rows[item.copy]] = (
                    f"logits processor {name} failed: {type(error).__name__}: {str(error)[:200]}"
                )
            row.clamp_(max=torch.finfo(torch.float32).max)  # a processor may force a token with infinity
        return failures


def _bias(table: Tensor, words: Tensor) -> Tensor:
    """32 bias values for each word of a mask."""
    return table.index_select(0, words.view(torch.uint8).int()).view(-1)
