"""Prompt embeddings: decoding, and check against the model's context before placeholder tokens are created."""

from __future__ import annotations

from kvolt.core.card import ModelCard
from kvolt.frontend.openai_api.prompt_embeds import PromptEmbeds, read_embeds
from kvolt.frontend.tokenization.off_loop import OffLoop
from kvolt.frontend.worker_request import PROMPT_EMBEDS, too_long

_INLINE_CHARACTERS = 256 * 1024
"""Longer ones are decoded in a thread, off the event loop."""
_NO_TOKEN = 0


async def embedded_prompts(
    embeds_fields: str | list[str], card: ModelCard, num_output: int, off_loop: OffLoop
) -> list[PromptEmbeds]:
    """Decode embeddings; raises InvalidRequest if one is invalid or has more rows than the context has tokens."""
    texts = [embeds_fields] if isinstance(embeds_fields, str) else embeds_fields

    def read() -> list[PromptEmbeds]:
        return [read_embeds(text) for text in texts]

    is_short = sum(map(len, texts)) <= _INLINE_CHARACTERS
    decoded = read() if is_short else await off_loop.run(read)
    for each in decoded:
        if each.num_rows >= card.context_length:
            raise too_long(card, each.num_rows, num_output, PROMPT_EMBEDS)
    return decoded


def placeholder_tokens(embeds: PromptEmbeds) -> tuple[int, ...]:
    """One placeholder token per row."""
    return (_NO_TOKEN,) * embeds.num_rows
