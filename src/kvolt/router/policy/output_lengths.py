"""OutputLengths: how long an answer will be, learned from those that ended. Pure.

Of one model. Answers are alike by who asks (tenant, adapter) and by what they ask for (a limit, a grammar): those are
the classes. A class of which little is known is taken for what the wider one is: all that ask for the like, then all
requests, then a guess.

It is a mean, and one that forgets: what a worker will have to hold is the sum over many requests, and the mean is what
adds up. No request is expected to say more than it may, or less than it must.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvolt.core.request import Request

FIRST_GUESS = 256.0
"""Tokens of an answer of which nobody said how long it will be, while none has ended."""

MAX_CLASSES = 4096
"""The one used longest ago makes room."""

_MEMORY = 64
"""Answers that count: one more than so many ago has lost most of its weight."""
_PRIOR = 4.0
"""How many answers of its own a class must have to count for as much as the wider one does."""

_Class = tuple[object, ...]
_ALL: _Class = ()


@dataclass(slots=True)
class _Mean:
    tokens: float = 0.0
    num_answers: int = 0


class OutputLengths:
    """See the module."""

    def __init__(self, max_classes: int = MAX_CLASSES) -> None:
        self._max_classes = max_classes
        self._means: dict[_Class, _Mean] = {}
        """In order of use."""

    @property
    def num_classes(self) -> int:
        return len(self._means)

    def expected(self, request: Request) -> float:
        """Tokens, of all its choices together; of one that resumes those that are left."""
        each = self._of_choice(request)
        if not request.is_resumed:
            return each * request.sampling.num_choices
        return sum(max(each - len(request.resumed(index)), 1.0) for index in request.open_choices)

    def _of_choice(self, request: Request) -> float:
        """Tokens of one choice, from its first on."""
        stop = request.stop
        hint = request.routing.expected_output_tokens
        if hint:
            return min(hint / request.sampling.num_choices, float(stop.max_tokens))
        if stop.ignore_eos and not stop.stop_token_ids:
            return float(stop.max_tokens)
        own, alike, _ = _classes(request)
        tokens = self._blend(self._blend(self.typical, alike), own)
        return min(max(tokens, float(stop.min_tokens), 1.0), float(stop.max_tokens))

    @property
    def typical(self) -> float:
        """Tokens of a choice of any request."""
        return self._blend(FIRST_GUESS, _ALL)

    def _blend(self, wider: float, name: _Class) -> float:
        """What is known of a class, the more so the more that is, and of the wider one."""
        mean = self._means.get(name)
        if mean is None:
            return wider
        num = min(mean.num_answers, _MEMORY)
        return (mean.tokens * num + wider * _PRIOR) / (num + _PRIOR)

    def learn(self, request: Request, output_tokens: int) -> None:
        """An answer has ended well, with so many tokens in all its choices."""
        tokens = output_tokens / request.sampling.num_choices
        for each in _classes(request):
            mean = self._means.pop(each, None) or _Mean()
            mean.num_answers += 1
            mean.tokens += (tokens - mean.tokens) / min(mean.num_answers, _MEMORY)
            self._means[each] = mean
        while len(self._means) > self._max_classes:
            del self._means[next(iter(self._means))]


def _classes(request: Request) -> tuple[_Class, _Class, _Class]:
    """From the narrowest to all."""
    limit, has_grammar = request.stop.max_tokens.bit_length(), request.grammar is not None
    return (limit, has_grammar, request.lora, request.routing.tenant), (limit, has_grammar), _ALL
