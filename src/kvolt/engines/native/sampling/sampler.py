"""Sampler: one token for every row of logits, with all sampling parameters of requests.

`sample` runs its three parts: `prepare` on the host, `Plan.choose` on the device without synchronisation, and
`PendingSamples.collect`, which waits for the device and reads all results in one copy.

In order: repetition, presence and frequency penalties, logit bias, banned and allowed tokens, grammar mask, custom
processors, temperature, top_k, top_p, min_p, then one uniform number per row (`draw.uniforms`). Rows are grouped by
their needs, so that unusual rows do not slow down plain ones: a step of plain rows is one argmax or one draw. Does not
know the meaning of tokens, or when a sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvolt.core.delta import TokenLogprobs
from kvolt.core.errors import InvalidRequest
from kvolt.core.request import Sampling
from kvolt.engines.native.sampling.draw import MAX_TOPK, Draws, Picked, draw, most_likely, to_device, uniforms
from kvolt.engines.native.sampling.logit_edits import Edits, History, MovedEdits, Processed, pack_ids
from kvolt.engines.native.sampling.logprobs import measure, read
from kvolt.engines.native.sampling.processors import LogitsProcessor

_GREEDY_BELOW = 1e-5
_NO_LIMIT = 1 << 40
_LARGE = 1_000_000
"""Far beyond useful values, and small enough for float32 arithmetic."""
_MOST_TOKENS = 2**31 - 1
_BOUNDS = (
    ("temperature", 0, _LARGE),
    ("top_p", 0, 1),
    ("top_k", -1, _MOST_TOKENS),
    ("min_p", 0, 1),
    ("presence_penalty", -_LARGE, _LARGE),
    ("frequency_penalty", -_LARGE, _LARGE),
    ("repetition_penalty", 0, _LARGE),
    ("logprobs", 0, _MOST_TOKENS),
    ("prompt_logprobs", 0, _MOST_TOKENS),
)
_NO_TOKEN = "no token is allowed: masks, bans and allowed_token_ids leave none"
_NOT_FINITE = "the model's logits are not finite"
_NOT_ZERO = ("top_p", "repetition_penalty")


class Filter(IntEnum):
    """The part of a row's weights that its filters need."""

    NONE = 0
    FLOOR = 1
    """Only min_p: none."""
    FEW = 2
    """top_k: the largest few."""
    ALL = 3
    """top_p: all, sorted."""


def _filter(params: Sampling) -> Filter:
    if params.temperature < _GREEDY_BELOW:
        return Filter.NONE
    if 0 < (params.top_k or 0) <= MAX_TOPK:
        return Filter.FEW
    if params.top_p < 1 or (params.top_k or 0) > 0:
        return Filter.ALL
    return Filter.FLOOR if params.min_p > 0 else Filter.NONE


@dataclass(slots=True, eq=False)
class Row:
    """The choice that a row of logits belongs to. Kept while the choice runs, so that tokens are counted once.

    `position`, `output`, `banned` and `mask` are set for each step; the other fields are constant.
    """

    sampling: Sampling
    seed: int
    choice: int = 0
    position: int = 0
    """Position of the token in the output, including prior tokens of a resumed request."""
    prompt: Sequence[int] = ()
    """Used by penalties and processors, as is the output."""
    output: Sequence[int] = ()
    banned: Sequence[int] = ()
    """Tokens that are not allowed in this step: those that would end a choice before its min_tokens."""
    mask: Tensor | None = None
    """Bitmask of a grammar, int32 on the host: bit i % 32 of word i // 32 allows token i."""
    processors: Sequence[LogitsProcessor] = ()
    is_greedy: bool = field(init=False)
    filter: Filter = field(init=False)
    is_penalized: bool = field(init=False)
    is_edited: bool = field(init=False)
    """Whether its logits are changed in every step; a mask or bans may be added in some."""
    _history: History | None = field(init=False, default=None)
    _allowed: NDArray[np.int32] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        params = self.sampling
        self.is_greedy = params.temperature < _GREEDY_BELOW
        self.filter = _filter(params)
        self.is_penalized = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.is_edited = bool(
            self.is_penalized or params.logit_bias or params.allowed_token_ids is not None or self.processors
        )

    def counted(self, vocabulary: int) -> History:
        if self._history is None:
            self._history = History()
        self._history.count(self.prompt, self.output, vocabulary)
        return self._history

    def allowed(self, vocabulary: int) -> NDArray[np.int32] | None:
        """Combined bitmask of the grammar and allowed_token_ids."""
        mask: NDArray[np.int32] | None = None if self.mask is None else self.mask.numpy()
        ids = self.sampling.allowed_token_ids
        if ids is None:
            return mask
        if self._allowed is None:
            self._allowed = pack_ids(ids, vocabulary)
        if mask is None:
            return self._allowed
        both = np.zeros_like(self._allowed)
        shared = min(len(mask), len(both))
        both[:shared] = mask[:shared] & self._allowed[:shared]
        return both


class Sampled(NamedTuple):
    """Result of a row. Without a token the row has failed, for the reason in `failure`; other rows are not affected."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    failure: str | None = None


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """InvalidRequest for sampling parameters out of range, which would fail the whole step, and for tokens
    outside the vocabulary, which the sampler ignores."""
    for param, least, most in _BOUNDS:
        value = getattr(sampling, param)
        if value is not None and not least <= value <= most:  # false for NaN
            raise InvalidRequest(f"{param} is {value}; it must be from {least} to {most}", param=param)
        if value == 0 and param in _NOT_ZERO:
            raise InvalidRequest(f"{param} is 0; it must be greater", param=param)
    for param, ids in (
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
    ):
        for token in ids:
            if not 0 <= token < vocabulary:
                raise InvalidRequest(
                    f"{param} names token {token}; the model has tokens 0 to {vocabulary - 1}", param=param
                )
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids is empty, so no token is possible", param="allowed_token_ids")


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """Sample a token for each row of logits [R, V], which are not modified."""
    if not rows:
        return []
    return prepare(rows, logits.shape[1], logits.device).choose(logits).collect()


class _Group(NamedTuple):
    """Rows that are sampled together."""

    rows: NDArray[np.int64]
    """Their rows in the step."""
    source: NDArray[np.int64] | None
    """Their rows among the changed copies; None for rows of the unchanged logits."""
    draws: Draws | None
    """None: the most likely token."""
    is_filtered: bool = False


def prepare(rows: Sequence[Row], vocabulary: int, device: torch.device | str) -> Plan:
    """Prepare a step on the host: group the rows and collect the values that they need."""
    edits = Edits(vocabulary)
    members: dict[tuple[bool, bool, Filter], list[int]] = {}
    copies: dict[int, int] = {}
    for number, row in enumerate(rows):
        edited = row.is_edited or row.mask is not None or bool(row.banned)
        if edited:
            copies[number] = len(edits.rows)
            edits.rows.append(number)
            _edit(edits, copies[number], row)
        members.setdefault((edited, row.is_greedy, row.filter), []).append(number)
    groups = [
        _Group(
            np.array(numbers, dtype=np.int64),
            np.array([copies[number] for number in numbers], dtype=np.int64) if edited else None,
            None if greedy else _draws([rows[number] for number in numbers]),
            filter != Filter.NONE,
        )
        for (edited, greedy, filter), numbers in members.items()
    ]
    moved_edits = MovedEdits(edits, torch.device(device)) if edits.rows else None
    measured = [number for number, row in enumerate(rows) if row.sampling.logprobs is not None]
    return Plan(rows, groups, moved_edits, measured)


def _draws(rows: list[Row]) -> Draws:
    params = [row.sampling for row in rows]
    return Draws(
        uniforms([row.seed for row in rows], [row.choice for row in rows], [row.position for row in rows]),
        1 / np.array([one.temperature for one in params], dtype=np.float64),
        np.array([one.top_k if (one.top_k or 0) > 0 else _NO_LIMIT for one in params], dtype=np.int64),
        np.array([one.top_p for one in params], dtype=np.float64),
        np.array([one.min_p for one in params], dtype=np.float64),
    )


def _edit(edits: Edits, copy: int, row: Row) -> None:
    params, vocabulary = row.sampling, edits.vocabulary
    if row.is_penalized:
        history = row.counted(vocabulary)
        if params.repetition_penalty != 1:
            edits.scaled.add(copy, history.seen, np.array([params.repetition_penalty], dtype=np.float32))
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            ids, counts = history.generated
            amounts = -(counts * params.frequency_penalty + params.presence_penalty)
            edits.added.add(copy, ids, amounts.astype(np.float32))
    if params.logit_bias:
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocabulary}
        edits.biased.add(copy, _ids(bias), np.fromiter(bias.values(), dtype=np.float32))
    if row.banned:
        banned = _ids({token for token in row.banned if 0 <= token < vocabulary})
        edits.banned.add(copy, banned, np.zeros(1, dtype=np.float32))
    mask = row.allowed(vocabulary)
    if mask is not None:
        edits.mask(copy, mask)
    if row.processors:
        edits.processed.append(Processed(copy, row.processors, row.prompt, row.output))


def _ids(tokens: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(tokens, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Plan:
    """A prepared step, to be applied to its logits."""

    _rows: Sequence[Row]
    _groups: list[_Group]
    _edits: MovedEdits | None
    _measured: list[int]
    """Rows whose log probabilities are requested."""

    @torch.inference_mode()
    def choose(self, logits: Tensor) -> PendingSamples:
        """Run the step on the device, without synchronisation."""
        logits = logits.float()
        failures: dict[int, str] = {}
        changed: Tensor | None = None
        if self._edits is not None:
            changed, failures = self._edits.apply(logits)
        picked = self._pick(logits, changed)
        measured = None
        if self._measured:
            top = max(self._rows[number].sampling.logprobs or 0 for number in self._measured)
            where = to_device(np.array(self._measured, dtype=np.int64), logits.device)
            measured = measure(logits[where], picked.tokens[where], top)
        return PendingSamples(self._rows, picked, self._measured, measured, failures)

    def _pick(self, logits: Tensor, changed: Tensor | None) -> Picked:
        if len(self._groups) == 1:
            return self._pick_group(self._groups[0], logits, changed, whole=True)
        tokens = torch.empty(len(self._rows), dtype=torch.int64, device=logits.device)
        maxima = torch.empty(len(self._rows), dtype=torch.float32, device=logits.device)
        for group in self._groups:
            part = self._pick_group(group, logits, changed, whole=False)
            where = to_device(group.rows, logits.device)
            tokens[where] = part.tokens
            maxima[where] = part.maxima.float()
        return Picked(tokens, maxima)

    def _pick_group(self, group: _Group, logits: Tensor, changed: Tensor | None, whole: bool) -> Picked:
        if group.source is None:
            source, rows = logits, None if whole else group.rows
        else:
            assert changed is not None
            source, rows = changed, None if whole else group.source
        if group.draws is None:
            return most_likely(source, rows)
        return draw(source, rows, group.draws, group.is_filtered)


class PendingSamples:
    """Tokens of a step, which the device may still be computing. `tokens` are on the device of the logits;
    those of failed rows are invalid."""

    __slots__ = ("_failures", "_host", "_measured", "_ready", "_rows", "tokens")

    def __init__(
        self,
        rows: Sequence[Row],
        picked: Picked,
        measured: list[int],
        logprob_values: Tensor | None,
        failures: dict[int, str],
    ) -> None:
        self.tokens = picked.tokens
        self._rows = rows
        self._measured = measured
        self._failures = failures
        parts = [picked.tokens.int(), picked.maxima.float().view(torch.int32)]
        if logprob_values is not None:
            parts.append(logprob_values.reshape(-1))
        packed = torch.cat(parts)
        self._ready: torch.cuda.Event | None = None
        if packed.device.type == "cpu":
            self._host = packed
        else:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def collect(self) -> list[Sampled]:
        """Wait for the device; returns one Sampled per row."""
        if self._ready is not None:
            self._ready.synchronize()
        num_rows = len(self._rows)
        tokens, logprob_values = self._host[:num_rows], self._host[2 * num_rows :]
        maxima = self._host[num_rows : 2 * num_rows].view(torch.float32).numpy()
        sampled = [Sampled(token) for token in tokens.tolist()]
        if self._measured:
            tops = [self._rows[number].sampling.logprobs or 0 for number in self._measured]
            measured_tokens = [sampled[number].token or 0 for number in self._measured]
            read_logprobs = read(measured_tokens, logprob_values.view(len(measured_tokens), -1), tops)
            for number, token, one in zip(self._measured, measured_tokens, read_logprobs, strict=True):
                sampled[number] = Sampled(token, one)
        for number in np.flatnonzero(~np.isfinite(maxima)).tolist():
            is_empty = maxima[number] == -np.inf
            sampled[number] = Sampled(None, failure=_NO_TOKEN if is_empty else _NOT_FINITE)
        for number, reason in self._failures.items():
            sampled[number] = Sampled(None, failure=reason)
        return sampled
