"""KV that was kept in eight bits: what that does to a model's answers, and how fast it goes.

    python -m benchmarks.kv.eight_bits           SmolLM2-135M on the CPU, some minutes; results/eight_bits.{json,txt}
    python -m benchmarks.kv.eight_bits --speed   how fast only, not kept

Effect: of texts in English (Python's own manual) the KV of the first 512 tokens goes through eight bits and back,
as a disk tier would have it, and the model reads the next 128 of the same text with it. The distributions of each
next token are held against those with the KV as it was. For scale the same with KV that was rounded to bfloat16,
which many engines compute with. Greedy: 64 tokens after the same beginnings, and how many are the same until the
first that is not.

Speed: a thread's own time for pieces of a block of this model, with and without the native module, beside zstd over
byte planes (`object_compression`). Bytes are those of plain blocks.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from benchmarks.runtime.report import keep_results, machine
from tokenizers import Tokenizer

from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.batch import Batch
from kvolt.engines.native.loading import load_core
from kvolt.engines.native.runner import ModelRunner
from kvolt.kv.disk import fp8 as eight_bits
from kvolt.kv.disk import fp8_python as eight_bits_python
from kvolt.kv.disk.fp8_python import KINDS, WIDTHS, packed_bytes
from kvolt.kv.object_store.packing import pack, unpack
from kvolt.models.checkpoint import open_checkpoint
from kvolt.models.fetch_progress import ProgressLog
from kvolt.models.resolve import resolve
from kvolt.runtime.clock import SystemClock

_RESULTS = Path(__file__).parent / "results" / "eight_bits"
MODEL = "smollm2-135m"
PREFIX, FORCED, GREEDY = 512, 128, 64
NUM_TEXTS = 12
TRIES, NUM_PIECES = 7, 64
NUM_VALUES = 184_320
"""Of a block of this model."""
_ONLY = np.zeros(1, dtype=np.int64)

Change = Callable[[bytes], bytes]


class Effect(msgspec.Struct, frozen=True):
    """Of KV that was changed, over all texts and positions."""

    change: str
    mean_logit: float
    """Mean distance of a logit; they spread by `logit_spread`."""
    max_logit: float
    logit_spread: float
    mean_kl: float
    p99_kl: float
    max_kl: float
    same_best: float
    """Share of positions where the likeliest token is the same."""
    loss_before: float
    loss_after: float
    """Nats per token of the text."""
    greedy_same: int
    """Texts whose 64 greedy tokens are all the same."""
    greedy_until: float
    """Of these 64, how many are the same before the first that is not, on average."""


class Speed(msgspec.Struct, frozen=True):
    dtype: str
    how: str
    encode_gb_s: float
    decode_gb_s: float
    ratio: float
    """What is left of the bytes."""


# --- the model


class Reader:
    """One sequence from block 0 on."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.block_size = runner.slab.shape.block_size

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        """Tokens from a position on; logits after each."""
        end = start + len(tokens)
        places = torch.arange(start, end)
        batch = Batch(
            token_ids=torch.tensor(list(tokens)),
            positions=places,
            slots=places,
            num_decodes=0,
            query_starts=[0, len(tokens)],
            context_lens=[end],
            context_lens_t=torch.tensor([end], dtype=torch.int32),
            block_tables=torch.arange(-(-end // self.block_size), dtype=torch.int32).unsqueeze(0),
            logit_rows=torch.arange(len(tokens)),
        )
        return self.runner.model.logits(self.runner.forward(batch)).double()

    def greedy(self, first: torch.Tensor, count: int) -> list[int]:
        """After the prefix, whose last logits these are."""
        found = [int(first.argmax())]
        while len(found) < count:
            found.append(int(self.read(found[-1:], PREFIX + len(found) - 1)[-1].argmax()))
        return found

    def blocks(self) -> list[bytes]:
        return [self.runner.slab.read(block) for block in range(PREFIX // self.block_size)]

    def put(self, blocks: Sequence[bytes]) -> None:
        for block, data in enumerate(blocks):
            self.runner.slab.write(block, data)


def texts(tokenizer: Tokenizer) -> list[list[int]]:
    topics = sorted(pydoc_data.topics.topics.items())
    whole = [tokenizer.encode(text).ids for _, text in topics]
    return [ids[: PREFIX + FORCED] for ids in whole if len(ids) >= PREFIX + FORCED][:NUM_TEXTS]


def in_eight_bits(data: bytes) -> bytes:
    kind = KINDS.index("float32")
    num_values = len(data) // WIDTHS[kind]
    packed, back = bytearray(packed_bytes(num_values)), bytearray(len(data))
    eight_bits.encode(memoryview(packed), _ONLY, memoryview(data), _ONLY, num_values, kind)
    eight_bits.decode(memoryview(back), _ONLY, memoryview(packed), _ONLY, num_values, kind)
    return bytes(back)


def in_bfloat16(data: bytes) -> bytes:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).bfloat16().float().numpy().tobytes()


def effects(reader: Reader, samples: Sequence[Sequence[int]]) -> list[Effect]:
    changes: dict[str, Change] = {
        "fp8": in_eight_bits,
        "bfloat16, then fp8": lambda data: in_eight_bits(in_bfloat16(data)),
        "bfloat16": in_bfloat16,
    }
    seen: dict[str, list[Any]] = {name: [] for name in changes}
    for number, ids in enumerate(samples):
        prefix, forced = ids[:PREFIX], ids[PREFIX:]
        first = reader.read(prefix, 0)[-1]
        plain = reader.blocks()
        greedy = reader.greedy(first, GREEDY)
        before = reader.read(forced, PREFIX)
        for name, change in changes.items():
            reader.put([change(block) for block in plain])
            after = reader.read(forced, PREFIX)
            again = reader.greedy(first, GREEDY)
            seen[name].append((before, after, forced, greedy, again))
        print(f"  text {number + 1} of {len(samples)}", file=sys.stderr, flush=True)
    return [_effect(name, found) for name, found in seen.items()]


def _effect(change: str, found: Sequence[Any]) -> Effect:
    before, after = (torch.cat([each[side] for each in found]) for side in (0, 1))
    far, likely = (after - before).abs(), before.log_softmax(dim=-1)
    kl = (likely.exp() * (likely - after.log_softmax(dim=-1))).sum(dim=-1)
    untils = [
        next((at for at, (one, two) in enumerate(zip(*each[3:], strict=True)) if one != two), GREEDY)
        for each in found
    ]
    return Effect(
        change=change,
        mean_logit=float(far.mean()),
        max_logit=float(far.max()),
        logit_spread=float(before.std(dim=-1).mean()),
        mean_kl=float(kl.mean()),
        p99_kl=float(kl.quantile(0.99)),
        max_kl=float(kl.max()),
        same_best=float((before.argmax(dim=-1) == after.argmax(dim=-1)).double().mean()),
        loss_before=_loss(found, 0),
        loss_after=_loss(found, 1),
        greedy_same=untils.count(GREEDY),
        greedy_until=statistics.fmean(untils),
    )


def _loss(found: Sequence[Any], side: int) -> float:
    """Of the tokens that follow in the text."""
    losses = [
        -each[side].log_softmax(dim=-1)[:-1].gather(1, torch.tensor(list(each[2][1:]))[:, None]).mean()
        for each in found
    ]
    return float(torch.stack(losses).mean())


# --- speed


def best_s(call: Callable[[], object]) -> float:
    found = math.inf
    for _ in range(TRIES):
        began = time.thread_time()
        call()
        found = min(found, time.thread_time() - began)
    return found


def speeds(num_values: int) -> list[Speed]:
    values = torch.from_numpy(
        np.random.default_rng(1).standard_normal(num_values * NUM_PIECES).astype(np.float32)
    )
    return [each for kind in range(len(KINDS)) for each in _speeds(values, num_values, kind)]


def _speeds(values: torch.Tensor, num_values: int, kind: int) -> list[Speed]:
    dtype, width, packed_size = KINDS[kind], WIDTHS[kind], packed_bytes(num_values)
    plain = memoryview(values.to(getattr(torch, dtype)).view(torch.uint8).numpy()).cast("B")
    packed, back = memoryview(bytearray(packed_size * NUM_PIECES)), memoryview(bytearray(plain.nbytes))
    at, to = np.arange(NUM_PIECES) * num_values * width, np.arange(NUM_PIECES) * packed_size
    one = bytes(plain[: num_values * width * 4])
    small = pack(one, width)
    ways: dict[str, tuple[Callable[[], object], Callable[[], object], int, float]] = {
        "numpy": (
            lambda: eight_bits_python.encode(packed, to, plain, at, num_values, kind),
            lambda: eight_bits_python.decode(back, at, packed, to, num_values, kind),
            plain.nbytes,
            packed.nbytes / plain.nbytes,
        ),
        "zstd": (
            lambda: pack(one, width),
            lambda: unpack(small, width, len(one)),
            len(one),
            len(small) / len(one),
        ),
    }
    if eight_bits.IS_NATIVE:
        ways["native"] = (
            lambda: eight_bits.encode(packed, to, plain, at, num_values, kind),
            lambda: eight_bits.decode(back, at, packed, to, num_values, kind),
            plain.nbytes,
            packed.nbytes / plain.nbytes,
        )
    return [
        Speed(dtype, how, size / best_s(down) / 1e9, size / best_s(up) / 1e9, ratio)
        for how, (down, up, size, ratio) in ways.items()
    ]


# --- what is told


def tell(all_effects: Sequence[Effect], all_speeds: Sequence[Speed]) -> str:
    lines = [f"{MODEL}, {NUM_TEXTS} texts, KV of {PREFIX} tokens changed, {FORCED} read after it"]
    for each in all_effects:
        lines.append(
            f"  KV through {each.change}: logits off by {each.mean_logit:.4f} on average, {each.max_logit:.2f} at most "
            f"(they spread by {each.logit_spread:.2f}); KL {each.mean_kl:.5f} on average, {each.p99_kl:.4f} p99, "
            f"{each.max_kl:.4f} at most; likeliest token the same {each.same_best:.1%}; loss {each.loss_before:.4f} -> "
            f"{each.loss_after:.4f}; greedy {each.greedy_same} of {NUM_TEXTS} texts the same for {GREEDY} tokens, "
            f"{each.greedy_until:.0f} until the first other"
        )
    lines.append("GB of plain blocks per second of one core: down, up; what is left")
    for row in all_speeds:
        lines.append(
            f"  {row.dtype:9} {row.how:7} {row.encode_gb_s:6.2f} {row.decode_gb_s:6.2f}   {row.ratio:.3f}"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--speed", action="store_true", help="how fast only")
    given = parser.parse_args(argv)
    found, all_effects = machine(), list[Effect]()
    if not given.speed:
        checkpoint = open_checkpoint(Path(resolve(MODEL, ProgressLog(SystemClock())).path))
        samples = texts(Tokenizer.from_str(checkpoint.tokenizer_json.decode()))
        # In float32: what eight bits change is not mixed with what narrow products do.
        arguments = NativeArguments(
            device="cpu", threads=2, dtype="float32", kv_blocks=64, measure_steps=False
        )
        core = load_core(EngineSpec(model=MODEL, role=Role.AGGREGATED), arguments)
        try:
            all_effects += effects(Reader(core.runner), samples)
        finally:
            core.close()
    all_speeds = speeds(NUM_VALUES)
    told = tell(all_effects, all_speeds)
    print(told)
    if not given.speed:
        rows = {"effects": all_effects, "speeds": all_speeds}
        keep_results(_RESULTS, "benchmarks.kv.eight_bits", found, told, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
