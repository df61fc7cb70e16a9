"""Cost of naming the blocks of one prompt: both identities, part by part, from a list of ints.

The bound is the least any scheme could do: one xxh3 over each block's bytes, already cut. Run as
`python -m benchmarks.core.hashing`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from benchmarks.harness import parser_for, report, run, table
from xxhash import xxh3_64_intdigest

from kvolt.core.block_key import BlockKeyChain, BlockKeyContext
from kvolt.core.hashing import BASE_SEED, SequenceHasher, local_hashes, sequence_hashes, token_bytes


def measure(work: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of each round, sorted."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)


def main() -> None:
    parser = parser_for(__file__, __doc__, results=None)
    parser.add_argument("--tokens", type=int, default=8192, help="prompt length (default %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=300, help="rounds per part (default %(default)s)")
    parser.add_argument(
        "--limit-ms", type=float, default=3.0, help="target for both identities (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the token ids (default %(default)s)")
    args = parser.parse_args()
    if args.smoke:
        args.tokens, args.rounds = 256, 3
    if min(args.tokens, args.block_size, args.rounds) < 1 or args.tokens < args.block_size:
        parser.error("need at least one round and one full block")

    rng = random.Random(args.seed)
    tokens = [rng.randrange(150_000) for _ in range(args.tokens)]
    context = BlockKeyContext(
        weights_hash="0" * 64, dtype="bfloat16", block_size=args.block_size, layout="nhd"
    )
    block_bytes = args.block_size * 4
    data = token_bytes(tokens)
    blocks = [data[at : at + block_bytes] for at in range(0, len(data) - block_bytes + 1, block_bytes)]
    local = local_hashes(tokens, args.block_size)

    def bound() -> None:
        for block in blocks:
            xxh3_64_intdigest(block, BASE_SEED)

    def routing() -> None:
        SequenceHasher(args.block_size).extend(tokens)

    def stored() -> None:
        BlockKeyChain(context).extend(tokens)

    def both() -> None:
        routing()
        stored()

    def token_by_token() -> None:
        hasher = SequenceHasher(args.block_size)
        for token in tokens:
            hasher.extend((token,))

    parts: dict[str, Callable[[], object]] = {
        "bound: xxh3 per block": bound,
        "token bytes": lambda: token_bytes(tokens),
        "local hashes": lambda: local_hashes(tokens, args.block_size),
        "sequence hashes from local": lambda: sequence_hashes(local),
        "SequenceHasher": routing,
        "BlockKeyChain": stored,
        "both identities": both,
        "SequenceHasher, one by one": token_by_token,
    }
    body, best_bound, medians = [], 0.0, {}
    for name, work in parts.items():
        times = measure(work, args.rounds)
        best_bound = best_bound or times[0]
        medians[name] = statistics.median(times)
        p95 = times[int(0.95 * (len(times) - 1))]
        values = (*(f"{each:.3f}" for each in (times[0], medians[name], p95)), f"{times[0] / best_bound:.1f}")
        body.append((name, *values))
    about = f"{args.tokens} tokens in blocks of {args.block_size}, {args.rounds} rounds, ms"
    share = medians["both identities"] / args.limit_ms
    last = f"both identities take {share:.2f} of the {args.limit_ms:g} ms allowed"
    text = "\n".join([about, table("part | best | median | p95 | x bound", body), last])
    report(args, text, {"median_ms": medians})


if __name__ == "__main__":
    run(main)
