"""Builds the ModelCard of a checkpoint, for models that the native engine serves."""

from __future__ import annotations

from kvolt.core.card import ModelCard
from kvolt.models.checkpoint import Checkpoint

_SMALL_MODEL_WEIGHTS = 400_000_000
_SMALL_MODEL_TOKENS = 1024
"""Default `max_tokens` of small models, which often repeat themselves until the context is full."""


def model_card(name: str, checkpoint: Checkpoint, block_size: int) -> ModelCard:
    """The card of a model. Names no parsers: a frontend derives them from the chat template."""
    config = checkpoint.config
    return ModelCard(
        name=name,
        tokenizer_json=checkpoint.tokenizer_json,
        chat_template=checkpoint.chat_template,
        context_length=config.context_length,
        block_size=block_size,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        defaults=dict(checkpoint.sampling_defaults),
        default_max_tokens=_SMALL_MODEL_TOKENS if config.num_weights < _SMALL_MODEL_WEIGHTS else None,
    )
