"""The engine's memory on a GPU: the largest step beside what is set aside for it, and the slab seen from elsewhere."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import torch
from benchmarks.engine.gpu_bench import Bench
from benchmarks.engine.gpu_engine import engine_of, request_of
from torch import Tensor, multiprocessing

from kvolt.core.request import Sampling
from kvolt.engines.native.sizing import largest_step_bytes

_GIB = 2**30
_CHILD_S = 60.0


def step_memory(bench: Bench) -> dict[str, Any]:
    """As many sequences as there may be, drawn with top_p, after steps of as many prompt tokens as there may be."""
    core = engine_of(bench)
    limits, config = core.scheduler.limits, bench.config
    length = max(4, limits.max_batch_tokens // limits.max_num_seqs * 2)
    rng = random.Random("memory")
    torch.cuda.reset_peak_memory_stats(bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    for number in range(limits.max_num_seqs):
        request = request_of([rng.randrange(config.vocab_size) for _ in range(length)], 4)
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=number)
        core.submit(msgspec.structs.replace(request, sampling=sampling))
    while core.has_work:
        core.step()
    peak = torch.cuda.max_memory_allocated(bench.device) - before
    bound = largest_step_bytes(config, limits.max_batch_tokens, limits.max_num_seqs, bench.dtype.itemsize)
    found = {"peak_gib": peak / _GIB, "set_aside_gib": bound / _GIB, "within": peak <= bound}
    bench.say(f"  {found}")
    return found


def slab_elsewhere(bench: Bench) -> dict[str, Any]:
    """Another process maps the slab (CUDA IPC), reads a block and writes one: the bytes are the same memory."""
    slab = engine_of(bench).runner.slab.tensor
    slab[1].fill_(3.0)
    slab[2].zero_()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_touch, args=(slab,))
    child.start()
    child.join(_CHILD_S)
    bench.sync()
    found = {"exit_code": child.exitcode, "seen_here": bool((slab[2] == 6.0).all())}
    bench.say(f"  {found}")
    return found


def _touch(slab: Tensor) -> None:
    slab[2].copy_(slab[1] * 2)
    torch.cuda.synchronize(slab.device)
