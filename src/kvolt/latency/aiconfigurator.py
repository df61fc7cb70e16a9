"""Steps that NVIDIA's aiconfigurator predicts, as if an engine had logged them: for GPUs that one does not have.

It adds up measured times of kernels, for many GPUs, models and engines. Owns which steps it is asked for, and what they
are in our terms; the fit is `latency_fit`'s. The package is an extra, and large: it is imported when it is asked.
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
"""Of the steps that are asked for: what is longer goes by what was seen here."""
_MAX_KV_TOKENS = 1 << 20
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_383)
_PROMPTS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_PREFIXES = (0, 1024, 4096, 8192)
_MIXED_PROMPTS = (128, 512, 2048)
_MIXED_NUM_PROMPTS = (1, 2)
_MIXED_BATCHES = (4, 32, 128)


class AicTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated, in aiconfigurator's words."""

    model: str
    """Name on the Hugging Face hub, of those that it knows, or a folder with a config.json."""
    system: str
    """As `h200_sxm`."""
    backend: str
    """`vllm`, `sglang` or `trtllm`."""
    backend_version: str | None = None
    """None: the newest that it has whole data for."""
    tensor_parallel: int = 1


class StepPredictor(Protocol):
    """What of aiconfigurator_core's EngineHandle is used. Milliseconds."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        """Prompts of `isl` tokens, the first `prefix` of them cached."""
        ...

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        """One step, after prompts of `isl` tokens and a first token."""
        ...

    def mixed_step_latency(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int = 0
    ) -> float:
        """`ctx_tokens` of prompts of `isl`, and `gen_tokens` answers after such prompts."""
        ...


def load_predictor(target: AicTarget) -> StepPredictor:
    """ConfigError when the package is not there, or has no data for what is wanted."""
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
    except Exception as error:  # it has a dozen kinds for what it does not know, of many families
        raise ConfigError(
            f"aiconfigurator has no {target.model} with {target.backend} on {target.system}: {error}",
            key="aiconfigurator",
            remedy="for example: --aiconfigurator meta-llama/Meta-Llama-3.1-8B h200_sxm vllm",
        ) from error
    return predictor


@contextmanager
def _quiet() -> Iterator[None]:
    """It warns of every table that another backend's data stands in for, also of those that are not read."""
    logger = logging.getLogger(_MODULE)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def header_of(target: AicTarget) -> StepLogHeader:
    """Says that nobody measured these steps."""
    gpus = f"{target.tensor_parallel} x " if target.tensor_parallel > 1 else ""
    return StepLogHeader(
        engine=target.backend,
        model=target.model,
        device=f"{gpus}{target.system}, predicted by {PACKAGE} {version(PACKAGE)}",
        block_size=16,
    )


def predicted_steps(predictor: StepPredictor) -> list[StepStats]:
    """Steps of many sizes with their times: prompts, decodes, and both at once. ConfigError if it can tell none."""
    asked = [*_prompt_steps(predictor), *_decode_steps(predictor), *_mixed_steps(predictor)]
    steps: list[StepStats] = []
    failure: Exception | None = None
    with _quiet():
        for step, predict_ms in asked:
            try:
                time_ms = predict_ms()
            except Exception as error:  # outside of what its tables cover
                failure = error
                continue
            steps.append(msgspec.structs.replace(step, time_s=time_ms / 1e3))
    if not steps:
        raise ConfigError(
            f"aiconfigurator can predict no step: {failure}",
            key="aiconfigurator",
            remedy="choose another model, system or backend version",
        )
    return steps


_Asked = Iterator[tuple[StepStats, Callable[[], float]]]


def _prompt_steps(predictor: StepPredictor) -> _Asked:
    for new in _PROMPTS:
        for prefix in _PREFIXES:
            length = new + prefix
            if length <= MAX_CONTEXT:
                step = StepStats(prefill_tokens=new, prefill_context=new * length)
                yield step, partial(predictor.predict_prefill_latency, 1, length, prefix)


def _decode_steps(predictor: StepPredictor) -> _Asked:
    for batch in _BATCHES:
        for context in _CONTEXTS:
            if batch * context <= _MAX_KV_TOKENS:
                step = StepStats(batch=batch, context_tokens=batch * (context + 1))
                yield step, partial(predictor.predict_decode_latency, batch, context, 2)


def _mixed_steps(predictor: StepPredictor) -> _Asked:
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
