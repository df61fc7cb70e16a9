"""Prompts that come as vectors, held against the model's context: they are counted before anything stands for them."""

from __future__ import annotations

from kvolt.core.card import ModelCard
from kvolt.frontend.openai_api.prompt_embeds import PromptEmbeds, read_embeds
from kvolt.frontend.tokenization.off_loop import OffLoop
from kvolt.frontend.worker_request import PROMPT_EMBEDS, too_long

_INLINE_CHARACTERS = 256 * 1024
"""Longer ones are read in a thread: the loop carries other people's tokens."""
_NO_TOKEN = 0


async def embedded_prompts(
    given: str | list[str], card: ModelCard, num_wanted: int, off_loop: OffLoop
) -> list[PromptEmbeds]:
    """InvalidRequest for what is no tensor, or one with more rows than the context has tokens."""
    texts = [given] if isinstance(given, str) else given

    def read() -> list[PromptEmbeds]:
        return [read_embeds(text) for text in texts]

    is_short = sum(map(len, texts)) <= _INLINE_CHARACTERS
    found = read() if is_short else await off_loop.run(read)
    for each in found:
        if each.num_rows >= card.context_length:
            raise too_long(card, each.num_rows, num_wanted, PROMPT_EMBEDS)
    return found


def stand_ins(embeds: PromptEmbeds) -> tuple[int, ...]:
    """A token for each row, which says nothing of it."""
    return (_NO_TOKEN,) * embeds.num_rows
