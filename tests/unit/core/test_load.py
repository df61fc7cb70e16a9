"""The step log: what was measured, line by line."""

from __future__ import annotations

import msgspec
import pytest

from kvolt.core.errors import InvalidRequest
from kvolt.core.latency import LatencyModel, fit_features
from kvolt.core.load import StepLogHeader, StepStats, WorkerLoad, decode_step_log, encode_step_log

HEADER = StepLogHeader(engine="sim", model="m", device="cpu", block_size=16)
STEPS = [StepStats(), StepStats(1, 2, 3, 4, 0.5), StepStats(batch=8, context_tokens=10**12, time_s=1e-9)]


def test_round_trip() -> None:
    lines = list(encode_step_log(HEADER, STEPS))
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert decode_step_log(lines) == (HEADER, STEPS)
    assert decode_step_log(b"".join(lines).splitlines(keepends=True)) == (HEADER, STEPS)


def test_blank_lines_are_skipped() -> None:
    lines = list(encode_step_log(HEADER, STEPS))
    assert decode_step_log([b"\n", lines[0], b"  \n", *lines[1:], b""]) == (HEADER, STEPS)


@pytest.mark.parametrize("lines", [[], [b"\n"]])
def test_empty_log(lines: list[bytes]) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        decode_step_log(lines)


@pytest.mark.parametrize(
    "bad",
    [
        b"{",
        b"[]",
        b'{"batch": "one"}',
        b"\xff\xfe",
        b'{"batch": "\xff"}',
        b"[" * 5000,
        b'{"x":' + b"[" * 9000,
    ],
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_bad_line_is_named(bad: bytes, number: int) -> None:
    lines = list(encode_step_log(HEADER, STEPS))
    lines[number - 1] = bad + b"\n"
    with pytest.raises(InvalidRequest) as caught:
        decode_step_log(lines)
    assert caught.value.fields == {"param": "step_log", "line": number}


@pytest.mark.parametrize("name", StepStats.__struct_fields__)
def test_a_negative_figure_is_named(name: str) -> None:
    lines = list(encode_step_log(HEADER, [*STEPS, msgspec.structs.replace(STEPS[1], **{name: -1})]))
    with pytest.raises(InvalidRequest, match=f"step log line 5: {name} is -1") as caught:
        decode_step_log(lines)
    assert caught.value.fields == {"param": "step_log", "line": 5}


def test_another_version_is_refused() -> None:
    header = msgspec.structs.replace(HEADER, version=2)
    with pytest.raises(InvalidRequest, match="version 2"):
        decode_step_log(encode_step_log(header, []))


def test_features_are_the_models_terms() -> None:
    model = LatencyModel(
        base_s=2.0,
        prefill_token_s=3.0,
        prefill_context_s=5.0,
        batch_s=7.0,
        context_token_s=11.0,
        prefill_step_s=13.0,
    )
    weights = [getattr(model, name) for name in model.__struct_fields__ if name.endswith("_s")]
    repeated_read_s = model.shared_kv_read * model.context_token_s
    for step in [*STEPS, StepStats(batch=3, context_tokens=900, shared_tokens=400)]:
        predicted = sum(
            weight * feature
            for weight, feature in zip([*weights, repeated_read_s], fit_features(step), strict=True)
        )
        assert predicted == model.step_s(step)


def test_load_carries_no_defaults() -> None:
    assert msgspec.to_builtins(WorkerLoad(running=1)) == {"running": 1}
