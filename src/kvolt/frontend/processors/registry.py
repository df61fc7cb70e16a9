"""Processors by name: built-in ones, and plugins in the entry point group `kvolt.processors`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.frontend.tokenization.preprocess import CardProcessor, NewProcessor, ParserNames, check_parsers

GROUP = "kvolt.processors"
DEFAULT = "card"


class ProcessorKind(msgspec.Struct, frozen=True):
    """Factory of a model's processor."""

    build: NewProcessor
    check: Callable[[ParserNames], None] = lambda names: None
    """Raises ConfigError for parsers that no model could use, such as unknown names. Called before the frontend
    listens."""


def _card() -> ProcessorKind:
    return ProcessorKind(CardProcessor, check_parsers)


def _vllm() -> ProcessorKind:
    from kvolt.frontend.processors.vllm_processor import VllmProcessor
    from kvolt.frontend.processors.vllm_symbols import check_vllm

    return ProcessorKind(VllmProcessor, check_vllm)


_BUILT_IN: dict[str, Callable[[], ProcessorKind]] = {DEFAULT: _card, "vllm": _vllm}


def processor_names() -> list[str]:
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def find_processor(name: str) -> ProcessorKind:
    """Find a processor by name; raises ConfigError with the known names."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    for point in entry_points(group=GROUP, name=name):
        processor_kind = _loaded(name, point.load)
        if not isinstance(processor_kind, ProcessorKind):
            raise ConfigError(f"processor {name!r}: {point.value} is not a ProcessorKind", key="processor")
        return processor_kind
    raise ConfigError(
        f"unknown processor {name!r}",
        key="processor",
        remedy=f"known processors: {', '.join(processor_names())}",
    )


def _loaded(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"processor {name!r} cannot be loaded: {error}",
            key="processor",
            remedy="install its dependencies",
        ) from error
