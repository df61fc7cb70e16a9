"""Sampling: a token for every row of logits, with all that a request may ask of its choice.

`sample` does it, in three parts: `prepare` is the host's, `Plan.choose` the device's, which waits for nothing,
and `Chosen.collect` waits for the device and reads everything in one copy.

In order: repetition, presence and frequency penalties, logit bias, banned and allowed tokens, grammar mask,
custom processors, temperature, top_k, top_p, min_p, then one uniform number per row (`randomness`). Rows
are grouped by what they need, so that one odd row does not slow plain ones: without anything special a step
is one argmax or one draw. What the tokens mean is not known here, nor when a sequence ends.
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
from kvolt.engines.native.sampling.draw import FEW, Draws, Picked, draw, likeliest, to_device
from kvolt.engines.native.sampling.logit_edits import Edits, History, MovedEdits, Processed, pack_ids
from kvolt.engines.native.sampling.logprobs import measure, prompt_logprobs, read
from kvolt.engines.native.sampling.processors import LogitsProcessor
from kvolt.engines.native.sampling.randomness import uniforms

__all__ = ["Chosen", "Plan", "Row", "Sampled", "check_sampling", "prepare", "prompt_logprobs", "sample"]

_GREEDY_BELOW = 1e-5
_NO_LIMIT = 1 << 40
_LARGE = 1_000_000
"""Far more than means anything, and little enough for float32 to count with."""
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
_NOT_ZERO = ("top_p", "repetition_penalty")


class Filter(IntEnum):
    """What has to be known of a row's weights before it can be drawn."""

    NONE = 0
    FLOOR = 1
    """min_p alone: nothing."""
    FEW = 2
    """top_k: the largest few."""
    ALL = 3
    """top_p: all of them, in order."""


def _filter(asked: Sampling) -> Filter:
    if asked.temperature < _GREEDY_BELOW:
        return Filter.NONE
    if 0 < (asked.top_k or 0) <= FEW:
        return Filter.FEW
    if asked.top_p < 1 or (asked.top_k or 0) > 0:
        return Filter.ALL
    return Filter.FLOOR if asked.min_p > 0 else Filter.NONE


@dataclass(slots=True, eq=False)
class Row:
    """What a row of logits belongs to. Keep it while its choice runs: what is counted is counted once.

    From step to step set `position`, `output`, `banned` and `mask`; the rest stays.
    """

    sampling: Sampling
    seed: int
    choice: int = 0
    position: int = 0
    """Place of the token in the output, tokens that a resumed request came with included."""
    prompt: Sequence[int] = ()
    """Needed for penalties and processors, as is the output."""
    output: Sequence[int] = ()
    banned: Sequence[int] = ()
    """Tokens that may not come now: those that end a choice before its min_tokens."""
    mask: Tensor | None = None
    """Bitmask of a grammar, int32 on the host: bit i % 32 of word i // 32 allows token i."""
    processors: Sequence[LogitsProcessor] = ()
    is_greedy: bool = field(init=False)
    filter: Filter = field(init=False)
    is_penalized: bool = field(init=False)
    is_edited: bool = field(init=False)
    """Whether its logits change in every step; a mask or bans may come and go besides."""
    _history: History | None = field(init=False, default=None)
    _allowed: NDArray[np.int32] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        asked = self.sampling
        self.is_greedy = asked.temperature < _GREEDY_BELOW
        self.filter = _filter(asked)
        self.is_penalized = (
            asked.repetition_penalty != 1 or asked.presence_penalty != 0 or asked.frequency_penalty != 0
        )
        self.is_edited = bool(
            self.is_penalized or asked.logit_bias or asked.allowed_token_ids is not None or self.processors
        )

    def counted(self, vocabulary: int) -> History:
        if self._history is None:
            self._history = History()
        self._history.count(self.prompt, self.output, vocabulary)
        return self._history

    def allowed(self, vocabulary: int) -> NDArray[np.int32] | None:
        """The bitmask of the grammar and of allowed_token_ids together."""
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
    """What came of a row. No token: the row failed, and `failure` says why; the others are not touched."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    failure: str | None = None


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """InvalidRequest for numbers that cannot be sampled with, which would harm the whole step, and for tokens that the
    model does not have, which the sampler itself passes over."""
    for param, least, most in _BOUNDS:
        value = getattr(sampling, param)
        if value is not None and not least <= value <= most:  # as what is not a number never is
            raise InvalidRequest(f"{param} is {value}; it must be from {least} to {most}", param=param)
        if value == 0 and param in _NOT_ZERO:
            raise InvalidRequest(f"{param} is 0; it must be above", param=param)
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
        raise InvalidRequest("allowed_token_ids is empty: no token could come", param="allowed_token_ids")


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """A token for each row of logits [R, V]. The logits stay as they are."""
    if not rows:
        return []
    return prepare(rows, logits.shape[1], logits.device).choose(logits).collect()


class _Group(NamedTuple):
    """Rows that are chosen together."""

    rows: NDArray[np.int64]
    """Their places in the step."""
    source: NDArray[np.int64] | None
    """Their places among the changed copies; None: they are taken from the logits themselves."""
    draws: Draws | None
    """None: the likeliest token."""
    is_filtered: bool = False


def prepare(rows: Sequence[Row], vocabulary: int, device: torch.device | str) -> Plan:
    """The host's part of a step: who needs what, and the numbers for it."""
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
    moved = edits.move(torch.device(device)) if edits.rows else None
    measured = [number for number, row in enumerate(rows) if row.sampling.logprobs is not None]
    return Plan(rows, groups, moved, list(copies), measured)


def _draws(rows: list[Row]) -> Draws:
    asked = [row.sampling for row in rows]
    return Draws(
        uniforms([row.seed for row in rows], [row.choice for row in rows], [row.position for row in rows]),
        1 / np.array([one.temperature for one in asked], dtype=np.float64),
        np.array([one.top_k if (one.top_k or 0) > 0 else _NO_LIMIT for one in asked], dtype=np.int64),
        np.array([one.top_p for one in asked], dtype=np.float64),
        np.array([one.min_p for one in asked], dtype=np.float64),
    )


def _edit(edits: Edits, copy: int, row: Row) -> None:
    asked, vocabulary = row.sampling, edits.vocabulary
    if row.is_penalized:
        history = row.counted(vocabulary)
        if asked.repetition_penalty != 1:
            edits.scaled.add(copy, history.seen, np.array([asked.repetition_penalty], dtype=np.float32))
        if asked.presence_penalty != 0 or asked.frequency_penalty != 0:
            ids, counts = history.generated
            amounts = -(counts * asked.frequency_penalty + asked.presence_penalty)
            edits.added.add(copy, ids, amounts.astype(np.float32))
    if asked.logit_bias:
        bias = {token: value for token, value in asked.logit_bias.items() if 0 <= token < vocabulary}
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


class Plan:
    """A step's choices, ready for its logits."""

    __slots__ = ("_copied", "_edits", "_groups", "_measured", "_rows")

    def __init__(
        self,
        rows: Sequence[Row],
        groups: list[_Group],
        edits: MovedEdits | None,
        copied: list[int],
        measured: list[int],
    ) -> None:
        self._rows = rows
        self._groups = groups
        self._edits = edits
        self._copied = copied
        self._measured = measured

    @torch.inference_mode()
    def choose(self, logits: Tensor) -> Chosen:
        """The device's part. Nothing here waits for the device."""
        logits = logits.float()
        failures: dict[int, str] = {}
        changed: Tensor | None = None
        if self._edits is not None:
            changed, failed = self._edits.apply(logits)
            failures = {self._copied[copy]: reason for copy, reason in failed.items()}
        picked = self._pick(logits, changed)
        top = max((self._rows[number].sampling.logprobs or 0 for number in self._measured), default=0)
        measured = None
        if self._measured:
            where = to_device(np.array(self._measured, dtype=np.int64), logits.device)
            measured = measure(logits[where], picked.tokens[where], top)
        return Chosen(self._rows, picked, self._measured, measured, failures)

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
            return likeliest(source, rows)
        return draw(source, rows, group.draws, group.is_filtered)


class Chosen:
    """A step's tokens, maybe still being computed. `tokens` lie where the logits do; a failed row's is void."""

    __slots__ = ("_failures", "_host", "_measured", "_ready", "_rows", "_width", "tokens")

    def __init__(
        self,
        rows: Sequence[Row],
        picked: Picked,
        measured: list[int],
        figures: Tensor | None,
        failures: dict[int, str],
    ) -> None:
        self.tokens = picked.tokens
        self._rows = rows
        self._measured = measured
        self._failures = failures
        self._width = 0 if figures is None else figures.shape[1]
        parts = [picked.tokens.int(), picked.maxima.float().view(torch.int32)]
        if figures is not None:
            parts.append(figures.reshape(-1))
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
        """Waits for the device, then one Sampled per row."""
        if self._ready is not None:
            self._ready.synchronize()
        num_rows = len(self._rows)
        tokens, maxima, figures = torch.split(
            self._host, [num_rows, num_rows, len(self._measured) * self._width]
        )
        finite = np.isfinite(maxima.view(torch.float32).numpy())
        sampled = [Sampled(token) for token in tokens.tolist()]
        if self._measured:
            tops = [self._rows[number].sampling.logprobs or 0 for number in self._measured]
            theirs = [sampled[number].token or 0 for number in self._measured]
            read_figures = read(theirs, figures.view(len(theirs), self._width), tops)
            for number, token, one in zip(self._measured, theirs, read_figures, strict=True):
                sampled[number] = Sampled(token, one)
        if not finite.all():
            for number in np.flatnonzero(~finite).tolist():
                sampled[number] = Sampled(None, failure=_unsound(float(maxima.view(torch.float32)[number])))
        for number, reason in self._failures.items():
            sampled[number] = Sampled(None, failure=reason)
        return sampled


def _unsound(largest: float) -> str:
    if largest == -np.inf:
        return "no token is allowed: masks, bans and allowed_token_ids leave none"
    return "the model's logits are not finite"
