"""What a frontend and a router must know of an SGLang: its card, its registration, its limits. Pure."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.request import Role
from kvolt.engines.models.config import token_ids
from kvolt.engines.models.folder_texts import FolderTexts, decoded
from kvolt.engines.registry import EngineSpec
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.messages import Facts
from kvolt.engines.step_plan import Limits


class _HfEnds(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


def card_of(spec: EngineSpec, arguments: SglangArguments, model: Path, facts: Facts) -> ModelCard:
    texts = FolderTexts(model)
    own = decoded(model, "config.json", _HfEnds) or _HfEnds()
    ends = texts.ends(token_ids(own.eos_token_id))
    return ModelCard(
        name=arguments.served_name or spec.model,
        tokenizer_json=texts.tokenizer_json,
        chat_template=texts.chat_template,
        context_length=facts.context_length,
        block_size=facts.page_size,
        # Also those that only SGLang has found: it ends answers at them.
        eos_token_ids=tuple(dict.fromkeys((*ends, *facts.eos_token_ids))),
        bos_token_id=texts.begin(own.bos_token_id),
        defaults=dict(texts.sampling_defaults),
    )


def info_of(spec: EngineSpec, arguments: SglangArguments, card: ModelCard, facts: Facts) -> EngineInfo:
    features = ["KvEvents"] if facts.kv_sources else []
    features += ["Prefill"] if spec.role in (Role.PREFILL, Role.DECODE) else []
    features += ["Lora"] if facts.has_lora else []
    return EngineInfo(
        engine="sglang",
        role=spec.role,
        model=card.name,
        card=card_hash(card),
        block_size=facts.page_size,
        capacity=Capacity(
            max_num_seqs=facts.max_running_requests,
            max_batch_tokens=facts.max_batch_tokens,
            kv_total_blocks=num_blocks(facts),
        ),
        dp_ranks=tuple(range(facts.num_ranks)),
        features=tuple(features),
        needs=(Role.PREFILL,) if spec.role is Role.DECODE else (),
        kv_events=bool(facts.kv_sources),
        loras=tuple(arguments.loras),
    )


def num_blocks(facts: Facts) -> int:
    """Of each rank."""
    return facts.max_total_tokens // facts.page_size


def limits_of(arguments: SglangArguments, facts: Facts) -> Limits:
    return Limits(
        max_num_seqs=facts.max_running_requests,
        max_batch_tokens=max(facts.max_batch_tokens, facts.max_running_requests),
        max_waiting=arguments.max_waiting,
        context_length=facts.context_length,
        block_size=facts.page_size,
    )
