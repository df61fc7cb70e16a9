"""Custom logits processors: the protocol, the registry, and a built-in one.

A request names them in `extra["logits_processors"]`: a list of names, or of {"name": ..., "args": {...}}.
Names are built in or entry points of the group `kvolt.logits_processors`. An entry point is a factory, called
once per choice with the args as keyword arguments, that returns a processor. A processor may keep state, but
a choice can start in the middle (a resumed request), so it must use the `output` argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from torch import Tensor

from kvolt.core.errors import InvalidRequest, Unsupported

GROUP = "kvolt.logits_processors"
KEY = "logits_processors"
MAX_PROCESSORS = 16
_MAX_NGRAM = 64


class LogitsProcessor(Protocol):
    """Changes the logits of one row in place, after penalties and masks and before the temperature."""

    def __call__(self, logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> None: ...


ProcessorFactory = Callable[..., LogitsProcessor]


class BanRepeatedNgrams:
    """Prevents repetition of any run of `n` tokens, including those of the prompt."""

    __slots__ = ("_followers", "_n", "_num_indexed")

    def __init__(self, n: int) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= _MAX_NGRAM:
            raise ValueError(f"n must be a whole number from 1 to {_MAX_NGRAM}")
        self._n = n
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0

    def __call__(self, logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        num_tokens = len(prompt) + len(output)
        if num_tokens < self._num_indexed:
            self._followers.clear()
            self._num_indexed = 0
        if num_tokens < self._n:
            return
        width = self._n - 1
        first = max(self._num_indexed - width, 0)
        window = _tail(prompt, output, first)
        for end in range(max(self._num_indexed, width), num_tokens):
            at = end - first
            self._followers.setdefault(tuple(window[at - width : at]), []).append(window[at])
        self._num_indexed = num_tokens
        banned = self._followers.get(tuple(window[len(window) - width :]))
        if banned:
            logits[[token for token in banned if token < logits.shape[0]]] = float("-inf")


def _tail(prompt: Sequence[int], output: Sequence[int], first: int) -> list[int]:
    """The tokens from `first` on, usually a few at the end of the output."""
    if first >= len(prompt):
        return list(output[first - len(prompt) :])
    return [*prompt[first:], *output]


_BUILT_IN: dict[str, ProcessorFactory] = {"ban_repeated_ngrams": BanRepeatedNgrams}


def processor_names() -> list[str]:
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def find_processor(name: str) -> ProcessorFactory:
    """The factory of that name; InvalidRequest lists the known ones."""
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        return built_in
    for point in entry_points(group=GROUP, name=name):
        try:
            factory = point.load()
        except Exception as error:  # third-party code may raise anything
            raise Unsupported(
                f"logits processor {name!r} cannot be loaded: {error}", feature=f"{KEY}.{name}", param=KEY
            ) from error
        if callable(factory):
            return factory  # type: ignore[no-any-return]
        raise Unsupported(
            f"logits processor {name!r}: {point.value} is not callable", feature=f"{KEY}.{name}", param=KEY
        )
    raise InvalidRequest(
        f"unknown logits processor {name[:80]!r}; known: {', '.join(processor_names())}", param=KEY
    )


def make_processors(extra: Mapping[str, Any]) -> tuple[LogitsProcessor, ...]:
    """Create the processors of one choice from a request's `extra`. InvalidRequest if they are invalid."""
    items = extra.get(KEY)
    if items is None:
        return ()
    if not isinstance(items, list | tuple) or len(items) > MAX_PROCESSORS:
        raise InvalidRequest(f"{KEY} must be a list of at most {MAX_PROCESSORS}", param=KEY)
    return tuple(_create(item) for item in items)


def _create(item: object) -> LogitsProcessor:
    name, args = (item, {}) if isinstance(item, str) else _parse_item(item)
    factory = find_processor(name)
    try:
        return factory(**args)
    except Exception as error:  # third-party code: may fail its request, but not the engine
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise InvalidRequest(f"logits processor {name!r} cannot be created: {reason}", param=KEY) from error


def _parse_item(item: object) -> tuple[str, dict[str, Any]]:
    if isinstance(item, dict) and item.keys() <= {"name", "args"}:
        name, args = item.get("name"), item.get("args", {})
        if isinstance(name, str) and isinstance(args, dict) and all(isinstance(key, str) for key in args):
            return name, args
    raise InvalidRequest(f'each of {KEY} must be a name or {{"name": ..., "args": {{...}}}}', param=KEY)
