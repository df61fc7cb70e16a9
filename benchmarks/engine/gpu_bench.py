"""Common parts of the GPU benchmarks: the model's shape, clocks, results with their spread, and their file.

With `Bench.is_smoke` every phase takes seconds on a CPU, on a tiny model.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvolt.models.config import ModelConfig
from kvolt.models.weights import expected_shapes

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    context_length=32768,
    torch_dtype="bfloat16",
)
TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    context_length=1024,
)


class RandomWeights:
    """A checkpoint that was never trained: the same tensors for the same names, made on one device."""

    tokenizer_json = b"{}"
    chat_template = ""
    weights_hash = "random"

    def __init__(self, config: ModelConfig, device: torch.device, scale: float = 0.02) -> None:
        self.config = config
        self.generation_defaults: dict[str, float | int] = {}
        self._device = device
        self._scale = scale
        self._shapes = expected_shapes(config)

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape, dtype = self._shapes[name], dtype or torch.float32
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        draw = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=draw, device=self._device, dtype=torch.float32)
        return drawn.mul_(self._scale).to(dtype)


def matrix_params(config: ModelConfig) -> int:
    """Weights that every decoded token is multiplied with: all but the embedding."""
    return sum(
        torch.Size(shape).numel()
        for name, shape in expected_shapes(config).items()
        if name != "model.embed_tokens.weight"
    )


def kv_token_bytes(config: ModelConfig, itemsize: int = 2) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Matrix products (the last one for the last token only) and causal attention."""
    head = config.vocab_size * config.hidden_size
    matrices = 2.0 * (matrix_params(config) - head) * tokens + 2.0 * head
    attention = 2.0 * tokens * tokens * config.num_layers * config.num_heads * config.head_dim
    return matrices + attention


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


@dataclass
class Bench:
    """One run. Phases add their results to `results`, which is saved after each of them."""

    device: torch.device
    out: Path
    deadline_s: float
    is_smoke: bool = False
    rounds: int = 3
    results: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    """Objects that one phase builds and a later one uses: the engine, the peer."""
    started: float = field(default_factory=time.perf_counter)

    @property
    def config(self) -> ModelConfig:
        return TINY if self.is_smoke else LLAMA_8B

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_smoke else torch.bfloat16

    @property
    def left_s(self) -> float:
        return self.deadline_s - (time.perf_counter() - self.started)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:6.1f}] {text}", flush=True)

    def load(self) -> None:
        """Load the results of earlier phases."""
        path = self.out / "gpu.json"
        if path.exists():
            self.results = json.loads(path.read_text())

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu.json").write_text(json.dumps(self.results, indent=1, default=str))

    def phase(self, name: str, work: Callable[[Bench], dict[str, Any]]) -> None:
        """Run one phase; a failure is printed and saved, and the next phase runs."""
        if self.left_s < 5:
            self.say(f"{name}: skipped, the time is up")
            self.results[name] = {"skipped": "deadline"}
            return
        self.say(f"--- {name}")
        try:
            self.results[name] = work(self)
            for part, result in self.results[name].items():
                self.say(f"  {part}: {json.dumps(result, default=str)}")
        except Exception as error:  # a phase must not take the others with it
            traceback.print_exc()
            self.say(f"{name} FAILED: {type(error).__name__}: {str(error)[:300]}")
            self.results[name] = {"failed": f"{type(error).__name__}: {error}"}
        self.save()

    @contextmanager
    def attempt(self, what: str, into: dict[str, Any]) -> Iterator[None]:
        """A part of a phase that may fail alone."""
        try:
            yield
        except Exception as error:
            self.say(f"  {what} FAILED: {type(error).__name__}: {str(error)[:200]}")
            into[what] = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], Any], repeat: int = 10, warmup: int = 3) -> float:
        """Median time of a call, launches hidden behind each other."""
        for _ in range(warmup):
            work()
        self.sync()
        if self.device.type != "cuda":
            times = []
            for _ in range(repeat):
                start = time.perf_counter()
                work()
                times.append(time.perf_counter() - start)
            return statistics.median(times)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        torch.cuda.synchronize()
        each = [one.elapsed_time(two) / 1e3 for one, two in pairwise(marks)]
        return statistics.median(each)
