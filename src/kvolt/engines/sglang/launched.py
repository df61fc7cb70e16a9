"""Card and registration of a running SGLang, from the facts that its host reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external import description
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.host.messages import Facts
from kvolt.scheduler.step_plan import Limits


@dataclass(slots=True)
class Launched:
    """A running SGLang."""

    card: ModelCard
    info: EngineInfo
    limits: Limits
    vocab_size: int
    facts: Facts


def launched_from(spec: EngineSpec, arguments: SglangArguments, model: Path, facts: Facts) -> Launched:
    card = card_of(spec, arguments, model, facts)
    info = info_of(spec, arguments, card, facts)
    limits = description.limits_of(info, card, arguments.max_waiting)
    return Launched(card, info, limits, facts.vocab_size, facts)


def card_of(spec: EngineSpec, arguments: SglangArguments, model: Path, facts: Facts) -> ModelCard:
    return description.card_of(
        model,
        arguments.served_name or spec.model,
        context_length=facts.context_length,
        block_size=facts.page_size,
        extra_eos=facts.eos_token_ids,  # SGLang stops at them
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
            kv_total_blocks=facts.max_total_tokens // facts.page_size,  # per rank
        ),
        dp_ranks=tuple(range(facts.num_ranks)),
        features=tuple(features),
        kv_events=bool(facts.kv_sources),
        loras=tuple(arguments.loras),
    )
