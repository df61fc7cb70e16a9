"""What every adapter says of a model that somebody else has loaded: its card, and the limits of requests.

The texts come from the model's folder, as Hugging Face lays it out; figures come from the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.models.config import token_ids
from kvolt.models.folder_texts import FolderTexts, decoded
from kvolt.scheduler.step_plan import Limits


class HfConfig(msgspec.Struct):
    """The fields of config.json that matter; of a model that also sees, those of its text part besides."""

    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    text_config: HfConfig | None = None

    @property
    def text(self) -> HfConfig:
        return self.text_config or self


def config_of(model: Path) -> HfConfig:
    return decoded(model, "config.json", HfConfig) or HfConfig()


def card_of(
    model: Path, name: str, *, context_length: int, block_size: int, more_ends: Iterable[int] = ()
) -> ModelCard:
    """`more_ends`: tokens that only the engine knows to end an answer."""
    texts, own = FolderTexts(model), config_of(model)
    ends = texts.ends(token_ids(own.eos_token_id))
    return ModelCard(
        name=name,
        tokenizer_json=texts.tokenizer_json,
        chat_template=texts.chat_template,
        context_length=context_length,
        block_size=block_size,
        eos_token_ids=tuple(dict.fromkeys((*ends, *more_ends))),
        bos_token_id=texts.begin(own.bos_token_id),
        defaults=dict(texts.sampling_defaults),
    )


def limits_of(info: EngineInfo, card: ModelCard, max_waiting: int) -> Limits:
    capacity = info.capacity
    return Limits(
        max_num_seqs=capacity.max_num_seqs,
        max_batch_tokens=max(capacity.max_batch_tokens, capacity.max_num_seqs),
        max_waiting=max_waiting,
        context_length=card.context_length,
        block_size=card.block_size,
    )
