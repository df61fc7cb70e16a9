"""Effect of 8-bit KV on a model's answers, and the speed of the conversion.

    python -m benchmarks.kv.fp8           SmolLM2-135M on the CPU, some minutes; results/fp8.{json,txt}

Effect: of English texts (Python's own manual) the KV of the first 512 tokens is converted to fp8 and back, as by a disk
tier, and the model reads the next 128 tokens of the text with it. The distributions of each next token are compared
with those of the unchanged KV; for scale, also with KV rounded to bfloat16. Greedy: 64 tokens after the same prefixes,
and how many are equal before the first difference.

Speed: a thread's own time for pieces of a block of this model, with and without the native module, beside zstd over
byte planes (`object_compression`). Bytes are those of plain blocks.
"""

from __future__ import annotations

import math
import pydoc_data.topics
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from benchmarks.harness import Figure, parser_for, report, row_table, run, say
from benchmarks.processes import small_model
from tokenizers import Tokenizer

from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.batch import Batch
from kvolt.engines.native.loading import load_core
from kvolt.engines.native.runner import ModelRunner
from kvolt.kv.disk import fp8, fp8_python
from kvolt.kv.disk.fp8_python import KINDS, WIDTHS, packed_bytes
from kvolt.kv.object_store.packing import pack, unpack
from kvolt.models.checkpoint import open_checkpoint
from kvolt.models.fetch_progress import ProgressLog
from kvolt.models.resolve import resolve
from kvolt.runtime.clock import SystemClock

_ONLY = np.zeros(1, dtype=np.int64)

Change = Callable[[bytes], bytes]


class Plan(msgspec.Struct, frozen=True):
    prefix: int = 512
    forced: int = 128
    greedy: int = 64
    num_texts: int = 12
    tries: int = 7
    num_pieces: int = 64
    num_values: int = 184_320
    """Values of a block of SmolLM2-135M."""


SMOKE = Plan(32, 16, 4, 2, 1, 2, 1024)


class Effect(msgspec.Struct, frozen=True):
    """Effect of one change of the KV, over all texts and positions."""

    change: str
    mean_logit: float
    """Mean absolute difference of a logit; the logits' own deviation is `logit_spread`."""
    max_logit: float
    logit_spread: float
    mean_kl: float
    p99_kl: float
    max_kl: float
    same_best: float
    """Share of positions with the same most likely token."""
    loss_before: float
    loss_after: float
    """Nats per token of the text."""
    greedy_same: int
    """Texts whose greedy tokens are all equal."""
    greedy_until: float
    """Mean number of equal greedy tokens before the first difference."""


class Speed(msgspec.Struct, frozen=True):
    dtype: str
    codec: str
    encode_gb_s: float
    decode_gb_s: float
    ratio: float
    """Encoded over plain bytes."""


class Reader:
    """One sequence, in blocks from 0 on."""

    def __init__(self, runner: ModelRunner, plan: Plan) -> None:
        self.runner = runner
        self.plan = plan
        self.block_size = runner.slab.shape.block_size

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        """Compute tokens from a position on; logits after each."""
        end = start + len(tokens)
        positions = torch.arange(start, end)
        batch = Batch(
            token_ids=torch.tensor(list(tokens)),
            positions=positions,
            slots=positions,
            num_decodes=0,
            query_starts=[0, len(tokens)],
            context_lens=[end],
            context_lens_t=torch.tensor([end], dtype=torch.int32),
            block_tables=torch.arange(-(-end // self.block_size), dtype=torch.int32).unsqueeze(0),
            logit_rows=torch.arange(len(tokens)),
        )
        return self.runner.model.logits(self.runner.forward(batch)).double()

    def greedy(self, first: torch.Tensor) -> list[int]:
        """Greedy tokens after the prefix, whose last logits are `first`."""
        tokens = [int(first.argmax())]
        while len(tokens) < self.plan.greedy:
            tokens.append(int(self.read(tokens[-1:], self.plan.prefix + len(tokens) - 1)[-1].argmax()))
        return tokens

    def blocks(self) -> list[bytes]:
        return [self.runner.slab.read(block) for block in range(self.plan.prefix // self.block_size)]

    def put(self, blocks: Sequence[bytes]) -> None:
        for block, data in enumerate(blocks):
            self.runner.slab.write(block, data)


def texts(tokenizer: Tokenizer, plan: Plan) -> list[list[int]]:
    length = plan.prefix + plan.forced
    encoded = (tokenizer.encode(text).ids for _, text in sorted(pydoc_data.topics.topics.items()))
    return [ids[:length] for ids in encoded if len(ids) >= length][: plan.num_texts]


def through_fp8(data: bytes) -> bytes:
    kind = KINDS.index("float32")
    num_values = len(data) // WIDTHS[kind]
    packed, back = bytearray(packed_bytes(num_values)), bytearray(len(data))
    fp8.encode(memoryview(packed), _ONLY, memoryview(data), _ONLY, num_values, kind)
    fp8.decode(memoryview(back), _ONLY, memoryview(packed), _ONLY, num_values, kind)
    return bytes(back)


def through_bfloat16(data: bytes) -> bytes:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).bfloat16().float().numpy().tobytes()


CHANGES: dict[str, Change] = {
    "fp8": through_fp8,
    "bfloat16, then fp8": lambda data: through_fp8(through_bfloat16(data)),
    "bfloat16": through_bfloat16,
}


def effects(reader: Reader, samples: Sequence[Sequence[int]]) -> list[Effect]:
    plan = reader.plan
    rows: dict[str, list[Any]] = {name: [] for name in CHANGES}
    for number, ids in enumerate(samples):
        prefix, forced = ids[: plan.prefix], ids[plan.prefix :]
        first = reader.read(prefix, 0)[-1]
        plain = reader.blocks()
        greedy = reader.greedy(first)
        before = reader.read(forced, plan.prefix)
        for name, change in CHANGES.items():
            reader.put([change(block) for block in plain])
            after = reader.read(forced, plan.prefix)
            rows[name].append((before, after, forced, greedy, reader.greedy(first)))
        say(f"  text {number + 1} of {len(samples)}")
    return [_effect(name, row, plan.greedy) for name, row in rows.items()]


def _effect(change: str, rows: Sequence[Any], num_greedy: int) -> Effect:
    before, after = (torch.cat([row[side] for row in rows]) for side in (0, 1))
    distance, log_before = (after - before).abs(), before.log_softmax(dim=-1)
    kl = (log_before.exp() * (log_before - after.log_softmax(dim=-1))).sum(dim=-1)
    equal = [
        next((at for at, (one, two) in enumerate(zip(*row[3:], strict=True)) if one != two), num_greedy)
        for row in rows
    ]
    return Effect(
        change=change,
        mean_logit=float(distance.mean()),
        max_logit=float(distance.max()),
        logit_spread=float(before.std(dim=-1).mean()),
        mean_kl=float(kl.mean()),
        p99_kl=float(kl.quantile(0.99)),
        max_kl=float(kl.max()),
        same_best=float((before.argmax(dim=-1) == after.argmax(dim=-1)).double().mean()),
        loss_before=_loss(rows, 0),
        loss_after=_loss(rows, 1),
        greedy_same=equal.count(num_greedy),
        greedy_until=statistics.fmean(equal),
    )


def _loss(rows: Sequence[Any], side: int) -> float:
    """Mean loss of the tokens that follow in the text."""
    losses = [
        -row[side].log_softmax(dim=-1)[:-1].gather(1, torch.tensor(list(row[2][1:]))[:, None]).mean()
        for row in rows
    ]
    return float(torch.stack(losses).mean())


# --- speed


def best_s(call: Callable[[], object], tries: int) -> float:
    best = math.inf
    for _ in range(tries):
        started = time.thread_time()
        call()
        best = min(best, time.thread_time() - started)
    return best


def speeds(plan: Plan) -> list[Speed]:
    num_values = plan.num_values * plan.num_pieces
    values = torch.from_numpy(np.random.default_rng(1).standard_normal(num_values).astype(np.float32))
    return [row for kind in range(len(KINDS)) for row in _speeds(values, plan, kind)]


def _speeds(values: torch.Tensor, plan: Plan, kind: int) -> list[Speed]:
    num_values, dtype, width = plan.num_values, KINDS[kind], WIDTHS[kind]
    packed_size = packed_bytes(num_values)
    plain = memoryview(values.to(getattr(torch, dtype)).view(torch.uint8).numpy()).cast("B")
    packed, back = memoryview(bytearray(packed_size * plan.num_pieces)), memoryview(bytearray(plain.nbytes))
    at, to = np.arange(plan.num_pieces) * num_values * width, np.arange(plan.num_pieces) * packed_size
    piece = bytes(plain[: num_values * width * 4])
    compressed = pack(piece, width)
    codecs: dict[str, tuple[Callable[[], object], Callable[[], object], int, float]] = {
        "zstd": (
            lambda: pack(piece, width),
            lambda: unpack(compressed, width, len(piece)),
            len(piece),
            len(compressed) / len(piece),
        )
    }
    for name, module in (("numpy", fp8_python), ("native", fp8)):
        if module is fp8_python or fp8.IS_NATIVE:
            codecs[name] = (
                lambda module=module: module.encode(packed, to, plain, at, num_values, kind),
                lambda module=module: module.decode(back, at, packed, to, num_values, kind),
                plain.nbytes,
                packed.nbytes / plain.nbytes,
            )
    return [
        Speed(dtype, name, size / best_s(down, plan.tries) / 1e9, size / best_s(up, plan.tries) / 1e9, ratio)
        for name, (down, up, size, ratio) in codecs.items()
    ]


# ---


_EFFECTS = (
    Figure("KV through", "change", ""),
    Figure("logits off, mean", "mean_logit", ".4f"),
    Figure("max", "max_logit"),
    Figure("(their deviation)", "logit_spread"),
    Figure("KL mean", "mean_kl", ".5f"),
    Figure("p99", "p99_kl", ".4f"),
    Figure("max", "max_kl", ".4f"),
    Figure("most likely token equal", "same_best", ".1%"),
    Figure("loss", lambda row: f"{row.loss_before:.4f} -> {row.loss_after:.4f}", ""),
    Figure("texts with equal greedy tokens", "greedy_same", ""),
    Figure("greedy tokens before the first difference", "greedy_until", ".0f"),
)
_SPEEDS = (
    Figure("GB of plain blocks per second of a core", "dtype", ""),
    Figure("codec", "codec", ""),
    Figure("encode", "encode_gb_s"),
    Figure("decode", "decode_gb_s"),
    Figure("bytes left", "ratio", ".3f"),
)


def text_of(plan: Plan, model: str, effects: Sequence[Effect], speeds: Sequence[Speed]) -> str:
    about = (
        f"{model}, {plan.num_texts} texts, KV of {plan.prefix} tokens changed, {plan.forced} read after it"
    )
    return "\n\n".join([about, row_table(_EFFECTS, effects), row_table(_SPEEDS, speeds)])


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    plan = SMOKE if options.smoke else Plan()
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder), options.smoke)
        checkpoint = open_checkpoint(Path(resolve(model, ProgressLog(SystemClock())).path))
        samples = texts(Tokenizer.from_str(checkpoint.tokenizer_json.decode()), plan)
        # float32: the rounding of narrow products would add to that of fp8.
        arguments = NativeArguments(
            device="cpu", threads=2, dtype="float32", kv_blocks=64, measure_steps=False
        )
        core = load_core(EngineSpec(model=model, role=Role.AGGREGATED), arguments)
        try:
            all_effects = effects(Reader(core.runner, plan), samples)
        finally:
            core.close()
    all_speeds = speeds(plan)
    text = text_of(plan, Path(model).name, all_effects, all_speeds)
    report(options, text, {"effects": all_effects, "speeds": all_speeds})


if __name__ == "__main__":
    run(main)
