"""Step times predicted by NVIDIA's aiconfigurator, in the form of a step log, for GPUs that are not available.

aiconfigurator adds up measured kernel times for many GPUs, models and engines. Owns the choice of the steps to
predict and their conversion to StepStats; `latency.fit` fits them. The package is a large extra, imported on
first use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.core.load import StepLogHeader, StepStats

PACKAGE = "aiconfigurator-core"
_MODULE = "aiconfigurator_core"

MAX_CONTEXT = 16_384
"""Longest context of a predicted step; the fitted model extrapolates beyond it."""
_MAX_KV_TOKENS = 1 << 20
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_383)
_PROMPTS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_PREFIXES = (0, 1024, 4096, 8192)
_MIXED_PROMPTS = (128, 512, 2048)
_MIXED_NUM_PROMPTS = (1, 2)
_MIXED_BATCHES = (4, 32, 128)


class AicTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment to predict, in aiconfigurator's terms."""

    model: str
    """A name on the Hugging Face hub that aiconfigurator knows, or a folder with a config.json."""
    system: str
    """GPU system, for example `h200_sxm`."""
    backend: str
    """`vllm`, `sglang` or `trtllm`."""
    backend_version: str | None = None
    """None: the newest version with complete data."""
    tensor_parallel: int = 1


class StepPredictor(Protocol):
    """The methods of aiconfigurator_core's EngineHandle that are used. Times are in milliseconds."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        """A step of `bs` prompts of `isl` tokens, the first `prefix` of each cached."""
        ...

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        """A decode step after prompts of `isl` tokens and a first token."""
        ...

    def mixed_step_latency(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int = 0
    ) -> float:
        """A step with `ctx_tokens` of prompts of `isl` tokens and `gen_tokens` decodes after such prompts."""
        ...


def load_predictor(target: AicTarget) -> StepPredictor:
    """ConfigError if the package is missing or has no data for the target."""
    try:
        sdk: Any = import_module(f"{_MODULE}.sdk")
    except ImportError as error:
        raise ConfigError(
            f"{PACKAGE} cannot be imported: {error}",
            key="aiconfigurator",
            remedy="pip install 'kvolt[aiconfigurator]' (Linux on x86-64)",
        ) from error
    try:
        with _quiet():
            predictor: StepPredictor = sdk.EngineHandle.compile(
                target.model,
                target.system,
                target.backend,
                backend_version=target.backend_version,
                tp_size=target.tensor_parallel,
            )
    except Exception as error:  # its errors for unknown targets have no common base class
        raise ConfigError(
            f"aiconfigurator has no {target.model} with {target.backend} on {target.system}: {error}",
            key="aiconfigurator",
            remedy="for example: --aiconfigurator meta-llama/Meta-Llama-3.1-8B h200_sxm vllm",
        ) from error
    return predictor


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence its warnings about tables replaced by another backend's data, many of which are not used."""
    logger = logging.getLogger(_MODULE)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def header_of(target: AicTarget) -> StepLogHeader:
    """Header of the step log; the device says that the steps are predicted."""
    gpus = f"{target.tensor_parallel} x " if target.tensor_parallel > 1 else ""
    return StepLogHeader(
        engine=target.backend,
        model=target.model,
        device=f"{gpus}{target.system}, predicted by {PACKAGE} {version(PACKAGE)}",
        block_size=16,
    )


def predicted_steps(predictor: StepPredictor) -> list[StepStats]:
    """Steps of many sizes with predicted times: prefills, decodes and mixed. ConfigError if none can be predicted."""
    candidates = [*_prompt_steps(predictor), *_decode_steps(predictor), *_mixed_steps(predictor)]
    steps: list[StepStats] = []
    failure: Exception | None = None
    with _quiet():
        for step, predict_ms in candidates:
            try:
                time_ms = predict_ms()
            except Exception as error:  # not covered by its tables
                failure = error
                continue
            steps.append(msgspec.structs.replace(step, time_s=time_ms / 1e3))
    if not steps:
        raise ConfigError(
            f"aiconfigurator cannot predict any step: {failure}",
            key="aiconfigurator",
            remedy="choose another model, system or backend version",
        )
    return steps


_Candidates = Iterator[tuple[StepStats, Callable[[], float]]]


def _prompt_steps(predictor: StepPredictor) -> _Candidates:
    for new in _PROMPTS:
        for prefix in _PREFIXES:
            length = new + prefix
            if length <= MAX_CONTEXT:
                step = StepStats(prefill_tokens=new, prefill_context=new * length)
                yield step, partial(predictor.predict_prefill_latency, 1, length, prefix)


def _decode_steps(predictor: StepPredictor) -> _Candidates:
    for batch in _BATCHES:
        for context in _CONTEXTS:
            if batch * context <= _MAX_KV_TOKENS:
                step = StepStats(batch=batch, context_tokens=batch * (context + 1))
                yield step, partial(predictor.predict_decode_latency, batch, context, 2)


def _mixed_steps(predictor: StepPredictor) -> _Candidates:
    for length in _MIXED_PROMPTS:
        for number in _MIXED_NUM_PROMPTS:
            for batch in _MIXED_BATCHES:
                new = number * length
                step = StepStats(
                    batch=batch,
                    prefill_tokens=new,
                    prefill_context=new * length,
                    context_tokens=batch * (length + 1),
                )
                yield step, partial(predictor.mixed_step_latency, new, batch, length, 2)
