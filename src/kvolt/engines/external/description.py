"""Model card, registration and request limits of an external engine.

Texts come from the model's folder in Hugging Face layout; numbers come from the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.request import Role
from kvolt.models.config import token_ids
from kvolt.models.folder_texts import FolderTexts
from kvolt.models.json_files import read_json
from kvolt.scheduler.step_plan import Limits


class HfConfig(msgspec.Struct):
    """Fields used from config.json; multimodal models have them in `text_config`."""

    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    text_config: HfConfig | None = None

    @property
    def text(self) -> HfConfig:
        return self.text_config or self


def config_of(model: Path) -> HfConfig:
    return read_json(model, "config.json", HfConfig) or HfConfig()


def card_of(
    model: Path, name: str, *, context_length: int, block_size: int, extra_eos: Iterable[int] = ()
) -> ModelCard:
    """`extra_eos`: EOS tokens known to the engine only."""
    texts, own = FolderTexts(model), config_of(model)
    ends = texts.eos_token_ids(token_ids(own.eos_token_id))
    return ModelCard(
        name=name,
        tokenizer_json=texts.tokenizer_json,
        chat_template=texts.chat_template,
        context_length=context_length,
        block_size=block_size,
        eos_token_ids=tuple(dict.fromkeys((*ends, *extra_eos))),
        bos_token_id=texts.bos_token_id(own.bos_token_id),
        defaults=dict(texts.generation_defaults),
    )


def info_of(engine: str, role: Role, card: ModelCard, capacity: Capacity, **optional: Any) -> EngineInfo:
    """Registration of an engine that serves this card. `optional`: further fields."""
    return EngineInfo(
        engine=engine,
        role=role,
        model=card.name,
        card=card_hash(card),
        block_size=card.block_size,
        capacity=capacity,
        **optional,
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
