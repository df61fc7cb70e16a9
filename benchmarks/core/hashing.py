"""Cost of naming the blocks of one prompt: both identities, part by part, from a list of ints.

The bound is the least any scheme could do: one xxh3 over each block's bytes, already cut. Run as
`python -m benchmarks.core.hashing`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.harness import parser_for, report, run, spread, table
from xxhash import xxh3_64_intdigest

from kvolt.core.block_key import BlockKeyChain, BlockKeyContext
from kvolt.core.hashing import BASE_SEED, SequenceHasher, local_hashes, sequence_hashes, token_bytes

BLOCK_SIZE = 16
LIMIT_MS = 3.0
"""Limit for each of the two identities."""


def measure(work: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of each round, sorted."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)


def main() -> None:
    options = parser_for(__file__, __doc__, results=None).parse_args()
    num_tokens, rounds = (256, 3) if options.smoke else (8192, 300)
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(num_tokens)]
    context = BlockKeyContext(weights_hash="0" * 64, dtype="bfloat16", block_size=BLOCK_SIZE, layout="nhd")
    data, local = token_bytes(tokens), local_hashes(tokens, BLOCK_SIZE)
    blocks = [data[at : at + 4 * BLOCK_SIZE] for at in range(0, len(data), 4 * BLOCK_SIZE)]

    def token_by_token() -> None:
        hasher = SequenceHasher(BLOCK_SIZE)
        for token in tokens:
            hasher.extend((token,))

    parts: dict[str, Callable[[], object]] = {
        "bound: xxh3 per block": lambda: [xxh3_64_intdigest(block, BASE_SEED) for block in blocks],
        "token bytes": lambda: token_bytes(tokens),
        "local hashes": lambda: local_hashes(tokens, BLOCK_SIZE),
        "sequence hashes from local": lambda: sequence_hashes(local),
        "SequenceHasher": lambda: SequenceHasher(BLOCK_SIZE).extend(tokens),
        "BlockKeyChain": lambda: BlockKeyChain(context).extend(tokens),
        "both identities": lambda: (
            SequenceHasher(BLOCK_SIZE).extend(tokens),
            BlockKeyChain(context).extend(tokens),
        ),
        "SequenceHasher, one by one": token_by_token,
    }
    body, bound, medians = [], 0.0, {}
    for name, work in parts.items():
        times = measure(work, rounds)
        bound, medians[name] = bound or times[0], spread(times).median
        values = (times[0], medians[name], times[int(0.95 * (rounds - 1))])
        body.append((name, *(f"{each:.3f}" for each in values), f"{times[0] / bound:.1f}"))
    about = f"{num_tokens} tokens in blocks of {BLOCK_SIZE}, {rounds} rounds, ms"
    last = f"both identities take {medians['both identities'] / LIMIT_MS:.2f} of the {LIMIT_MS:g} ms allowed"
    text = "\n".join([about, table("part | best | median | p95 | x bound", body), last])
    report(options, text, {"median_ms": medians})


if __name__ == "__main__":
    run(main)
