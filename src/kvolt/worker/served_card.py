"""The model card that a worker serves: its engine's, under the names and with the defaults of the operator."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from kvolt.core.card import EngineInfo, ModelCard, card_hash
from kvolt.core.request import Sampling
from kvolt.engines.contract import Engine

log = logging.getLogger(__name__)

_SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator decides about a model, for any engine."""

    names: tuple[str, ...] = ()
    """Names for clients: the first is the model's, the others are aliases. Empty: the engine's name."""
    loaded_name: str | None = None
    """Name under which the model is loaded; None: the engine's name."""
    generation_defaults: dict[str, Any] | None = None
    """Replaces the engine's generation defaults; None: keep them."""


def served_card(engine: Engine, served: ServedModel) -> ModelCard:
    """Card of a started engine, as registered. Has no defaults that the engine does not implement: it would refuse
    each request that leaves them to the model."""
    card = engine.card
    wanted = _wanted_defaults(card, served)
    changes: dict[str, Any] = {}
    unsupported = _unsupported(engine, wanted)
    if unsupported or wanted != card.defaults:
        changes["defaults"] = {name: value for name, value in wanted.items() if name not in unsupported}
    if served.names:
        changes |= {"name": served.names[0], "aliases": served.names[1:]}
    return msgspec.structs.replace(card, **changes) if changes else card


def with_served_card(info: EngineInfo, engine: Engine, served: ServedModel) -> EngineInfo:
    """The registration of an engine with the names and hash of its served card."""
    card = served_card(engine, served)
    unsupported = _unsupported(engine, _wanted_defaults(engine.card, served))
    if unsupported:
        log.warning("generation defaults ignored: engine=%s unsupported=%s", info.engine, unsupported)
    root = served.loaded_name or engine.card.name
    changes: dict[str, Any] = {} if root == card.name else {"root": root}
    if card != engine.card:
        changes |= {"model": card.name, "card": card_hash(card)}
    return msgspec.structs.replace(info, **changes) if changes else info


def _wanted_defaults(card: ModelCard, served: ServedModel) -> dict[str, Any]:
    return card.defaults if served.generation_defaults is None else served.generation_defaults


def _unsupported(engine: Engine, defaults: Mapping[str, Any]) -> list[str]:
    return sorted((defaults.keys() & _SAMPLING_FIELDS) - engine.sampling_fields)
