"""OutputLengthEstimator: expected answer length, learned from completed answers. Pure.

Per model. Requests are classified by source (tenant, adapter) and by form (token limit, grammar). The estimate of a
class with few answers is blended with the wider one: all requests of that form, then all requests, then a default.

An exponentially weighted mean, since a worker's load is a sum over many requests. Bounded by the request's own limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvolt.core.request import Request

FIRST_GUESS = 256.0
"""Default for answers of unknown length, before any has completed."""

MAX_CLASSES = 4096
"""Least recently used classes beyond it are evicted."""

_WINDOW = 64
"""Averaging window in answers."""
_PRIOR = 4.0
"""Weight of the wider class, in answers."""

_Class = tuple[object, ...]
_ALL: _Class = ()


@dataclass(slots=True)
class _Mean:
    tokens: float = 0.0
    num_answers: int = 0


class OutputLengthEstimator:
    """See the module."""

    def __init__(self, max_classes: int = MAX_CLASSES) -> None:
        self._max_classes = max_classes
        self._means: dict[_Class, _Mean] = {}
        """Least recently used first."""

    @property
    def num_classes(self) -> int:
        return len(self._means)

    def expected_tokens(self, request: Request) -> float:
        """Expected tokens of all choices together; of a migrated request, those still missing."""
        each = self._of_choice(request)
        if not request.has_prior_tokens:
            return each * request.sampling.num_choices
        return sum(max(each - len(request.prior_tokens_of(index)), 1.0) for index in request.open_choices)

    def _of_choice(self, request: Request) -> float:
        """Expected tokens of one whole choice."""
        stop = request.stop
        hint = request.routing.expected_output_tokens
        if hint:
            return min(hint / request.sampling.num_choices, float(stop.max_tokens))
        if stop.ignore_eos and not stop.stop_token_ids:
            return float(stop.max_tokens)
        own, same_form, _ = _classes(request)
        tokens = self._blend(self._blend(self.typical, same_form), own)
        return min(max(tokens, float(stop.min_tokens), 1.0), float(stop.max_tokens))

    @property
    def typical(self) -> float:
        """Expected tokens of a choice of any request."""
        return self._blend(FIRST_GUESS, _ALL)

    def _blend(self, wider: float, name: _Class) -> float:
        """Mean of a class, blended with that of the wider class by number of answers."""
        mean = self._means.get(name)
        if mean is None:
            return wider
        num = min(mean.num_answers, _WINDOW)
        return (mean.tokens * num + wider * _PRIOR) / (num + _PRIOR)

    def record(self, request: Request, output_tokens: int) -> None:
        """Record a complete answer with the tokens of all its choices."""
        tokens = output_tokens / request.sampling.num_choices
        for each in _classes(request):
            mean = self._means.pop(each, None) or _Mean()
            mean.num_answers += 1
            mean.tokens += (tokens - mean.tokens) / min(mean.num_answers, _WINDOW)
            self._means[each] = mean
        while len(self._means) > self._max_classes:
            del self._means[next(iter(self._means))]


def _classes(request: Request) -> tuple[_Class, _Class, _Class]:
    """Classes of a request, from narrow to all."""
    limit, has_grammar = request.stop.max_tokens.bit_length(), request.grammar is not None
    return (limit, has_grammar, request.lora, request.routing.tenant), (limit, has_grammar), _ALL
