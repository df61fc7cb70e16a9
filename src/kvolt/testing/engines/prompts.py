"""Prompts for an arbitrary model: random tokens of its vocabulary, or found by trial."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

from msgspec.structs import replace
from tokenizers import Tokenizer

from kvolt.core.card import ModelCard
from kvolt.core.delta import FinishReason
from kvolt.core.errors import InvalidRequest
from kvolt.core.request import Request
from kvolt.frontend.templates.template import ChatTemplate
from kvolt.testing.engines.harness import Answer, Run

_LONGEST_PROMPT = 128
_LONGEST_ANSWER = 64
_NUM_TRIES = 12
_QUESTIONS = ("Say hi.", "Is water wet? Answer yes or no.", "What is 2 + 2?", "Name a colour.", "Bye!")


class Prompts:
    """Prompts of one model, from its card."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._tokenizer = Tokenizer.from_buffer(card.tokenizer_json)
        special = {*self._tokenizer.get_added_tokens_decoder(), *card.eos_token_ids, card.bos_token_id}
        known = sorted(self._tokenizer.get_vocab(with_added_tokens=False).values())
        rng = random.Random(1)
        usable = [token for token in known if token not in special]
        self._ids = tuple(rng.choices(usable, k=4096))

    def ordinary(self, num_tokens: int) -> tuple[int, ...]:
        """Random tokens without special ones; a longer prompt has the shorter ones as prefix."""
        return self._ids[:num_tokens]

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def likely_to_end(self) -> Iterator[tuple[int, ...]]:
        """Short questions in the chat template, if there is one; then random prompts."""
        template = ChatTemplate(self._card.chat_template) if self._card.chat_template.strip() else None
        for question in _QUESTIONS if template is not None else ():
            assert template is not None
            try:
                yield self.encode(template.render([{"role": "user", "content": question}]))
            except InvalidRequest:
                break
        for length in range(4, 4 + _NUM_TRIES):
            yield self.ordinary(length)


async def find_ending_prompt(
    run: Run, prompts: Prompts, candidate: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """Find a prompt for `Harness.ending_prompt` by trial; None if no candidate fits."""
    candidates = [candidate] if candidate is not None else list(islice(prompts.likely_to_end(), _NUM_TRIES))
    answers = [
        run.submit(_request(run, number, ids))
        for number, ids in enumerate(candidates)
        if 0 < len(ids) <= _LONGEST_PROMPT
    ]
    await run.finish(*answers)
    return next((answer.request.token_ids for answer in answers if _ends_well(answer)), None)


def _request(run: Run, number: int, ids: tuple[int, ...]) -> Request:
    plain = run.request(f"ending{number}", tokens=_LONGEST_ANSWER, choices=2)
    return replace(plain, token_ids=ids, stop=replace(plain.stop, ignore_eos=False))


def _ends_well(answer: Answer) -> bool:
    """Whether both choices end by EOS, after at least 2 tokens and at different lengths."""
    lengths = [len(answer.tokens[index]) for index in (0, 1)]
    ended = all(
        finish is FinishReason.STOP and answer.stop_reasons[index] is None
        for index, finish in answer.finishes.items()
    )
    return ended and min(lengths) >= 2 and lengths[0] != lengths[1]
