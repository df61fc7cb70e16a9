"""`kvolt fit`: from a log to a preset, the table of errors, and logs that are broken."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvolt.cli.main import main
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepLogHeader, StepStats, encode_step_log
from kvolt.engines.registry import check_arguments
from kvolt.engines.sim.arguments import step_model_of
from kvolt.engines.sim.engine import SimArguments
from kvolt.latency.aiconfigurator import AicTarget

HEADER = StepLogHeader(engine="native", model="Tiny 1B", device="Some GPU", block_size=16, dtype="bfloat16")
TRUE = LatencyModel(base_s=0.004, prefill_token_s=2e-5, context_token_s=1e-7)


def write_log(path: Path, num_steps: int = 200, prompts: bool = True) -> Path:
    rng = random.Random(5)
    steps = []
    for number in range(num_steps):
        batch = rng.randint(1, 20)
        new = rng.randint(1, 1000) if prompts and number % 4 == 0 else 0
        step = StepStats(batch, new, new * new, batch * rng.randint(10, 1000))
        steps.append(replace(step, time_s=TRUE.step_s(step)))
    path.write_bytes(b"".join(encode_step_log(HEADER, steps)))
    return path


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "steps.jsonl")
    assert main(["fit", str(log), "--name", "tiny"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("tiny: native engine, Tiny 1B in bfloat16 on Some GPU; 200 steps\n")
    lines = told.splitlines()
    assert "  base_s             0.004        4 ms for each step" in lines
    assert any(line.startswith("  batch_s            0 ") for line in lines)
    table = [line.split() for line in lines[lines.index("Worst steps") - 5 : lines.index("Worst steps") - 1]]
    assert [row[0] for row in table] == ["all", "prefill", "decode", "mixed"]
    assert table[0] == ["all", "160", "0.0%", "0.0%", "40", "0.0%", "0.0%"]
    assert table[1] == ["prefill", "only", "0", "-", "-", "0", "-", "-"]
    assert sum(line.startswith("  step ") for line in lines) == 5
    assert '--arg latency=\'{"base_s":0.004,' in lines[-1]


def test_what_was_written_is_a_preset_of_the_sim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = write_log(tmp_path / "steps.jsonl"), tmp_path / "tiny.json"
    assert main(["fit", str(log), "--out", str(out)]) == 0
    assert f"--arg preset={out}" in capsys.readouterr().out
    arguments = check_arguments("sim", {"preset": str(out)})
    assert isinstance(arguments, SimArguments)
    model = step_model_of(arguments)
    assert model.decode_s(4, 1000) == pytest.approx(TRUE.decode_s(4, 1000), rel=1e-4)
    assert json.loads(out.read_bytes())["name"] == "native-tiny-1b-some-gpu"


def test_a_bad_fit_has_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "steps.jsonl")
    header, *steps = log.read_bytes().splitlines(keepends=True)
    rng = random.Random(1)
    noisy = [
        {**(step := json.loads(line)), "time_s": step["time_s"] * rng.lognormvariate(0, 1)} for line in steps
    ]
    log.write_bytes(header + b"".join(json.dumps(step).encode() + b"\n" for step in noisy))
    assert main(["fit", str(log)]) == 0
    assert "\nwarning: large held-out errors (p90: all " in capsys.readouterr().out
    assert main(["fit", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"]["warnings"]


def test_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "steps.jsonl", prompts=False)
    assert main(["fit", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["log"]["device"] == "Some GPU"
    assert told["fit"]["latency"]["base_s"] == pytest.approx(0.004, rel=1e-4)
    assert [row["kind"] for row in told["fit"]["errors"]] == ["all", "prefill only", "decode only", "mixed"]
    assert {doubt["reason"] for doubt in told["fit"]["undetermined"]} == {"no step prefills"}


def test_what_a_log_cannot_tell_is_named_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(write_log(tmp_path / "steps.jsonl", prompts=False))]) == 0
    told = capsys.readouterr().out
    line = next(line for line in told.splitlines() if line.startswith("  prefill_token_s "))
    assert line.endswith("not determined: no step prefills; record a run in which prompts arrive")


def test_broken_logs_give_line_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "steps.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)

    def error_of(content: list[bytes]) -> str:
        log.write_bytes(b"".join(content))
        assert main(["fit", str(log)]) == 1
        return capsys.readouterr().err

    broken = error_of([*lines[:6], b"{nonsense\n", *lines[7:]])
    assert broken.startswith(f"kvolt: {log}: step log line 7: JSON is malformed")
    negative = error_of([*lines, b'{"batch":1,"time_s":-0.5}\n'])
    assert "step log line 202: time_s is -0.5, must not be negative" in negative
    assert "step log line 1: " in error_of(lines[1:])
    assert "the step log is empty" in error_of([])
    assert "has 3 steps with work and a time; at least 20 are needed" in error_of(lines[:4])


def test_files_that_cannot_be_read_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(tmp_path / "none")]) == 2
    assert "none cannot be read: No such file or directory (name a step log" in capsys.readouterr().err
    assert main(["fit", str(tmp_path)]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err
    log = write_log(tmp_path / "steps.jsonl")
    assert main(["fit", str(log), "--out", str(tmp_path / "no" / "folder")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in LatencyModel.__struct_fields__)
    assert "--arg step_log=" in told


class _Predictor:
    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        return 1e3 * TRUE.prefill_s(isl, prefix)

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        return 1e3 * TRUE.decode_s(bs, bs * (isl + 1))

    def mixed_step_latency(self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int) -> float:
        return 1e3 * TRUE.step_s(StepStats(gen_tokens, ctx_tokens, ctx_tokens * isl, gen_tokens * (isl + 1)))


def test_a_preset_without_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def load(target: AicTarget) -> _Predictor:
        asked.append(target)
        return _Predictor()

    monkeypatch.setattr("kvolt.cli.fit.load_predictor", load)
    monkeypatch.setattr("kvolt.latency.aiconfigurator.version", lambda name: "9.9")
    out = tmp_path / "h200.json"
    flags = ["--backend-version", "0.24.0", "--tensor-parallel", "2", "--out", str(out)]
    assert main(["fit", "--aiconfigurator", "a/b", "h200_sxm", "vllm", *flags]) == 0
    assert asked == [
        AicTarget(model="a/b", system="h200_sxm", backend="vllm", backend_version="0.24.0", tensor_parallel=2)
    ]
    told = capsys.readouterr().out
    assert "vllm engine, a/b on 2 x h200_sxm, predicted by aiconfigurator-core 9.9; 127 steps" in told
    preset = json.loads(out.read_bytes())
    assert preset["name"] == "vllm-a-b-2-x-h200-sxm"
    assert preset["latency"]["base_s"] == pytest.approx(0.004, rel=1e-3)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "no step log specified"),
        (["log", "--aiconfigurator", "a", "b", "c"], "LOG and --aiconfigurator are mutually exclusive"),
        (["--aiconfigurator", "a", "b", "c", "--tensor-parallel", "0"], "--tensor-parallel is 0"),
        (["--aiconfigurator", "a", "b"], "expected 3 arguments"),
    ],
)
def test_one_source_of_steps(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *argv]) == 2
    assert told in capsys.readouterr().err
