"""`kvolt trace analyze --tiers`: hit rates of KV tiers of given sizes on a trace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec

from kvolt.bench.traces.tiers import best_hits, found_in_tiers
from kvolt.cli.flags import option
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord
from kvolt.kv.tiers.eviction import EVICTIONS
from kvolt.kv.tiers.sizes import parse_capacity

DEFAULT_TOKEN_BYTES = 128 * 1024
"""KV bytes per token of Llama 8B in bfloat16."""


class TierFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One tier and the fraction of prompt blocks that it serves."""

    tier: str
    blocks: int
    share: float


class TierFindings(msgspec.Struct, frozen=True, kw_only=True):
    eviction: str
    block_bytes: int
    tiers: tuple[TierFinding, ...]
    share: float
    """Fraction of prompt blocks served by all tiers together."""
    best_share: float
    """Fraction served by an optimal cache of the same total size."""


def add_tier_flags(parser: argparse.ArgumentParser) -> None:
    option(
        parser,
        "--tiers",
        "NAME=SIZE,...",
        "Show hit rates of KV tiers, fastest first, such as device=40GiB,host=256GiB,disk=2TiB.",
    )
    parser.add_argument(
        "--token-bytes",
        type=int,
        default=DEFAULT_TOKEN_BYTES,
        metavar="N",
        help=f"KV bytes per token. [default: {DEFAULT_TOKEN_BYTES}, Llama 8B in bfloat16]",
    )
    option(parser, "--eviction", None, "Eviction policy.", default="lru", choices=sorted(EVICTIONS))


def tier_findings(records: Sequence[TraceRecord], args: argparse.Namespace) -> TierFindings:
    """Hit rates; ConfigError for invalid sizes or a trace without hash ids."""
    sizes = {record.block_size for record in records if record.hash_ids}
    if len(sizes) != 1:
        raise ConfigError(
            "the trace has no hash ids, or several block sizes",
            key="tiers",
            remedy="`kvolt trace convert --block-size`",
        )
    block_bytes = sizes.pop() * args.token_bytes
    names, blocks = [], []
    for text in args.tiers.split(","):
        name, _, size = text.partition("=")
        number = parse_capacity(size, f"--tiers {name}").blocks(block_bytes, 0)
        if number < 1:
            raise ConfigError(
                f"{text} holds no block of {block_bytes:,} bytes", key="tiers", remedy="increase its size"
            )
        names.append(name)
        blocks.append(number)
    hits_by_tier = found_in_tiers(records, blocks, args.eviction)
    num_asked, num_best = best_hits(records, sum(blocks))
    return TierFindings(
        eviction=args.eviction,
        block_bytes=block_bytes,
        tiers=tuple(
            TierFinding(tier=name, blocks=number, share=hits / max(hits_by_tier.num_blocks, 1))
            for name, number, hits in zip(names, blocks, hits_by_tier.by_tier, strict=True)
        ),
        share=hits_by_tier.hit_rate,
        best_share=num_best / max(num_asked, 1),
    )


def tiers_text(findings: TierFindings) -> str:
    lines = [f"tiers          {findings.eviction}, blocks of {findings.block_bytes / 2**20:,.1f} MiB"]
    lines += [
        f"  {each.tier:<12} {each.blocks:>12,} blocks  {each.share:6.1%} of prompt blocks"
        for each in findings.tiers
    ]
    lines += [f"  {'together':<12} {'':>12}         {findings.share:6.1%}; {findings.best_share:.1%} at best"]
    return "\n".join(lines)
