"""Steps that aiconfigurator predicts: in our terms, by a stand-in for it, and by itself where it is installed."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvolt.core.errors import ConfigError
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats
from kvolt.latency import aiconfigurator
from kvolt.latency.aiconfigurator import AicTarget, header_of, load_predictor, predicted_steps
from kvolt.latency.fit import StepKind, fit_latency

TARGET = AicTarget(
    model="a/b", system="h200_sxm", backend="vllm", backend_version="0.24.0", tensor_parallel=2
)
TRUE = LatencyModel(
    base_s=0.005,
    prefill_token_s=1.5e-5,
    prefill_context_s=1e-9,
    batch_s=1e-5,
    context_token_s=3e-8,
    prefill_step_s=0.002,
)


class Predictor:
    """Answers as EngineHandle does, by a model that is known."""

    def __init__(self, most_tokens: int = 1 << 30) -> None:
        self._most_tokens = most_tokens

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        assert isl > prefix
        if isl > self._most_tokens:
            raise ValueError("outside of the tables")
        return 1e3 * bs * TRUE.prefill_s(isl, prefix)

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        if bs * isl > self._most_tokens:
            raise ValueError("outside of the tables")
        return 1e3 * TRUE.decode_s(bs, bs * (isl + osl - 1))

    def mixed_step_latency(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int = 0
    ) -> float:
        if ctx_tokens > self._most_tokens:
            raise ValueError("outside of the tables")
        step = StepStats(gen_tokens, ctx_tokens, ctx_tokens * isl, gen_tokens * (isl + osl - 1))
        return 1e3 * TRUE.step_s(step)


def test_the_fit_finds_the_model_behind_the_predictions() -> None:
    steps = predicted_steps(Predictor())
    fit = fit_latency(steps)
    assert fit.undetermined == ()
    for name in TRUE.__struct_fields__:
        assert getattr(fit.latency, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert {StepKind.of(step) for step in steps} == set(StepKind)
    assert max(step.context_tokens for step in steps if step.batch == 1) <= aiconfigurator.MAX_CONTEXT


def test_steps_outside_of_its_tables_are_left_out() -> None:
    steps = predicted_steps(Predictor(most_tokens=2000))
    assert 20 < len(steps) < len(predicted_steps(Predictor()))
    with pytest.raises(ConfigError, match="cannot predict any step: outside of the tables"):
        predicted_steps(Predictor(most_tokens=0))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for the package: what it was asked for, and what it answers."""
    asked: dict[str, Any] = {"raises": None}

    def compile_(model: str, system: str, backend: str, **more: Any) -> Predictor:
        asked.update(model=model, system=system, backend=backend, **more)
        logging.getLogger("aiconfigurator_core").warning("a table is missing")
        if asked["raises"] is not None:
            raise asked["raises"]
        return Predictor()

    sdk = ModuleType("aiconfigurator_core.sdk")
    sdk.EngineHandle = SimpleNamespace(compile=compile_)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", ModuleType("aiconfigurator_core"))
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", sdk)
    monkeypatch.setattr(aiconfigurator, "version", lambda name: "9.9")
    return asked


def test_the_package_is_asked_for_what_is_wanted(
    package: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(load_predictor(TARGET), Predictor)
    assert package == {
        "raises": None,
        "model": "a/b",
        "system": "h200_sxm",
        "backend": "vllm",
        "backend_version": "0.24.0",
        "tp_size": 2,
    }
    assert not caplog.records, "its warnings are about unused tables"
    assert logging.getLogger("aiconfigurator_core").level == logging.NOTSET


def test_what_it_does_not_know_is_a_config_error(package: dict[str, Any]) -> None:
    package["raises"] = KeyError("no such system")
    with pytest.raises(ConfigError, match="aiconfigurator has no a/b with vllm on h200_sxm"):
        load_predictor(TARGET)


def test_without_the_package_the_error_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(ConfigError) as caught:
        load_predictor(TARGET)
    assert "pip install 'kvolt[aiconfigurator]'" in str(caught.value.fields["remedy"])


def test_the_header_says_that_steps_are_predicted(package: dict[str, Any]) -> None:
    assert header_of(TARGET).device == "2 x h200_sxm, predicted by aiconfigurator-core 9.9"


@pytest.mark.long
def test_the_real_package_predicts_what_a_gpu_could_do() -> None:
    pytest.importorskip(
        "aiconfigurator_core", reason="600 MB: pip install 'kvolt[aiconfigurator]' to run this"
    )
    target = AicTarget(model="meta-llama/Meta-Llama-3.1-8B", system="h200_sxm", backend="vllm")
    fit = fit_latency(predicted_steps(load_predictor(target)))
    # 16 GB of weights at 4.8 TB/s are 3.3 ms; 8B parameters at 990 TFLOP/s 16 us a token.
    assert 0.003 < fit.latency.base_s < 0.01
    assert 1e-5 < fit.latency.prefill_token_s < 5e-5
    held_out = fit.errors[0].held_out
    assert held_out.median is not None
    assert held_out.median < 0.08
