"""Roster: the workers of one endpoint as rows of a LoadBook, with what each said of itself when it registered.

Read off once per change of the instances, not once per request. Owns which instance is which row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvolt.core.card import EngineInfo
from kvolt.core.ids import InstanceId
from kvolt.core.latency import Floats, StepModel, prompt_s
from kvolt.router.load import LoadBook, Rows
from kvolt.runtime.address import Instance
from kvolt.runtime.client import EndpointClient
from kvolt.runtime.wire import MALFORMED

log = logging.getLogger(__name__)

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode

_GUESSED_TOKEN_S = 50e-6
"""What a prompt token takes where the worker did not say: about that of an 8B model on a large GPU."""

_MOST_CHUNKS = 64
"""Of a prompt whose time is worked out: a worker that says that its steps are tiny must not cost us an hour."""


@dataclass(frozen=True, slots=True)
class Member:
    """One worker."""

    row: int
    info: EngineInfo | None


class Prices:
    """What a prompt takes at each candidate, from the step models that they registered.

    Workers that share a model, as nearly all do, are worked out together.
    """

    def __init__(self, infos: Sequence[EngineInfo | None]) -> None:
        groups: dict[tuple[StepModel | None, int], list[int]] = {}
        self.total_blocks = np.zeros(len(infos))
        for index, info in enumerate(infos):
            chunk = 0 if info is None else info.capacity.max_batch_tokens
            groups.setdefault((None if info is None else info.step_model, chunk), []).append(index)
            if info is not None:
                self.total_blocks[index] = info.capacity.kv_total_blocks
        self._groups = [
            (model, chunk, np.array(indexes, dtype=np.intp)) for (model, chunk), indexes in groups.items()
        ]

    def prefill_s(self, prompt_tokens: int, new_tokens: Floats) -> Floats:
        """In chunks as large as the worker's steps are."""
        times = np.empty(len(new_tokens))
        for model, chunk, indexes in self._groups:
            news = new_tokens[indexes]
            if model is None:
                times[indexes] = news * _GUESSED_TOKEN_S
                continue
            known: dict[float, float] = {}
            for index, new in zip(indexes, news, strict=True):  # few of them differ: most hold nothing
                if new not in known:
                    least = -(-int(new) // _MOST_CHUNKS)
                    known[new] = prompt_s(model, prompt_tokens, prompt_tokens - int(new), max(chunk, least))
                times[index] = known[new]
        return times

    def slowdown_s(
        self, prompt_tokens: int, output_tokens: float, decoding: Floats, context: Floats
    ) -> Floats:
        """By how much longer so many decode steps take with one more sequence in them."""
        times = np.zeros(len(decoding))
        for model, _, indexes in self._groups:
            if model is None:
                continue
            alone = model.decode_s_each(decoding[indexes], context[indexes])
            joined = model.decode_s_each(decoding[indexes] + 1, context[indexes] + prompt_tokens)
            times[indexes] = np.maximum(joined - alone, 0.0) * output_tokens
        return np.where(decoding > 0, times, 0.0)


@dataclass(frozen=True, slots=True)
class Field:
    """The candidates for a request."""

    instances: Sequence[Instance]
    rows: Rows
    prices: Prices


class Roster:
    """Of one endpoint, for as long as its client lives."""

    def __init__(self, client: EndpointClient, book: LoadBook, on_gone: Callable[[int], None]) -> None:
        """`on_gone` is told the row of a worker that is no more."""
        self._client = client
        self._book = book
        self._on_gone = on_gone
        self._members: dict[InstanceId, Member] = {}
        self._is_known = False
        self._everyone: Field | None = None
        client.on_change(self._forget)

    def _forget(self) -> None:
        self._is_known = False
        self._everyone = None

    def member(self, instance_id: InstanceId) -> Member | None:
        self._look()
        return self._members.get(instance_id)

    def field(self, instances: Sequence[Instance]) -> Field:
        """The candidates; they are nearly always the same, all of them."""
        self._look()
        if self._everyone is not None and self._everyone.instances is instances:
            return self._everyone
        members = [self._members[instance.id] for instance in instances]
        rows = np.array([member.row for member in members], dtype=np.intp)
        field = Field(instances, rows, Prices([member.info for member in members]))
        if instances is self._client.candidates():
            self._everyone = field
        return field

    def _look(self) -> None:
        if self._is_known:
            return
        self._is_known = True
        there = {instance.id: instance for instance in self._client.instances()}
        for instance_id in [each for each in self._members if each not in there]:
            row = self._members.pop(instance_id).row
            self._book.drop_row(row)
            self._on_gone(row)
        for instance_id, instance in there.items():
            known = self._members.get(instance_id)
            row = self._book.add_row() if known is None else known.row
            self._members[instance_id] = Member(row, _info_of(instance))


def _info_of(instance: Instance) -> EngineInfo | None:
    try:
        return _decode_info(instance.info)
    except MALFORMED:
        log.warning("instance %s says of itself what cannot be read", instance.id)
        return None
