"""`kvolt fit`: fit a step latency model to a step log or to aiconfigurator's predictions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvolt.cli.flags import option, optional, switch
from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepLogHeader, decode_step_log
from kvolt.latency.aiconfigurator import AicTarget, header_of, load_predictor, predicted_steps
from kvolt.latency.fit import BadStep, Errors, Fit, fit_latency
from kvolt.latency.presets import PresetFile

HELP = """
Fit a step latency model to the step log of an engine, for use by the sim engine.

Examples:
  kvolt serve smollm2-135m --arg step_log=steps.jsonl    1. record: send load of varied sizes, then stop
  kvolt fit steps.jsonl                                  2. fit, and check the errors
  kvolt fit steps.jsonl --name cpu --out cpu.json        3. save as a preset
  kvolt serve sim-tiny --arg preset=cpu.json             4. simulate

Without the engine or its GPU, from NVIDIA's kernel measurements (pip install 'kvolt[aiconfigurator]'):
  kvolt fit --aiconfigurator meta-llama/Meta-Llama-3.1-8B h200_sxm vllm --out h200.json
  kvolt fit --aiconfigurator Qwen/Qwen3-32B h100_sxm sglang --tensor-parallel 2

The time of a step is the sum of
  base_s             per step
  prefill_token_s    per prompt token computed
  prefill_context_s  per pair of a computed prompt token and a token it attends to
  batch_s            per sequence that decodes a token
  context_token_s    per context token read by decoding sequences
  prefill_step_s     per step that computes prompt tokens
  shared_kv_read     fraction of context_token_s for reading a shared block once more in the same step
All coefficients are non-negative. The model is fitted to four fifths of the log; the held-out errors are those of the
rest. Coefficients that the log does not determine are 0 and listed with what a better log needs; so are large errors.
"""

_MEANING = {
    "base_s": "each step",
    "prefill_token_s": "each prompt token",
    "prefill_context_s": "each attended pair of prompt tokens",
    "batch_s": "each decoding sequence",
    "context_token_s": "each context token read",
    "prefill_step_s": "each step with prompt tokens",
    "shared_kv_read": "relative cost of reading a shared block again",
}


class FitReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`."""

    name: str
    log: StepLogHeader
    fit: Fit


def configure(parser: argparse.ArgumentParser) -> None:
    optional(parser, "log", "LOG", "Step log of an engine (engine argument step_log=FILE).")
    parser.add_argument(
        "--aiconfigurator",
        nargs=3,
        metavar=("MODEL", "SYSTEM", "BACKEND"),
        help="Use steps predicted by NVIDIA's aiconfigurator instead of a log, for example for h200_sxm and vllm.",
    )
    option(
        parser,
        "--backend-version",
        "V",
        "Backend version for --aiconfigurator. Default: the newest with data.",
    )
    option(parser, "--tensor-parallel", "N", "Tensor parallel size for --aiconfigurator.", int, default=1)
    option(parser, "--name", None, "Name of the preset. Default: from engine, model and device.")
    option(parser, "--out", "FILE", "Write the preset to FILE, for --arg preset=FILE.")
    switch(parser, "--json", "Print JSON.")
    parser.set_defaults(without_config=_fit)


def _fit(args: argparse.Namespace) -> int:
    header, fit = _predict_and_fit(args) if args.aiconfigurator else _read_and_fit(_log_of(args))
    name = args.name or _name_of(header)
    if args.out is not None:
        preset = PresetFile(name=name, about=_about(header, fit), latency=fit.latency)
        _write(args.out, msgspec.json.format(msgspec.json.encode(preset)) + b"\n")
    if args.json:
        print(msgspec.json.encode(FitReport(name=name, log=header, fit=fit)).decode())
    else:
        print("\n".join(_page(name, header, fit, args.out)))
    return 0


def _log_of(args: argparse.Namespace) -> str:
    if args.log is None:
        raise ConfigError("no step log specified", key="log", remedy="see `kvolt fit --help`")
    return str(args.log)


def _predict_and_fit(args: argparse.Namespace) -> tuple[StepLogHeader, Fit]:
    if args.log is not None:
        raise ConfigError(
            "LOG and --aiconfigurator are mutually exclusive", key="log", remedy="use one of them"
        )
    if args.tensor_parallel < 1:
        raise ConfigError(
            f"--tensor-parallel is {args.tensor_parallel}", key="tensor_parallel", remedy="must be 1 or more"
        )
    model, system, backend = args.aiconfigurator
    target = AicTarget(
        model=model,
        system=system,
        backend=backend,
        backend_version=args.backend_version,
        tensor_parallel=args.tensor_parallel,
    )
    steps = predicted_steps(load_predictor(target))
    return header_of(target), fit_latency(steps)


def _read_and_fit(log: str) -> tuple[StepLogHeader, Fit]:
    try:
        with Path(log).open("rb") as lines:
            header, steps = decode_step_log(lines)
    except OSError as error:
        raise ConfigError(
            f"{log} cannot be read: {error.strerror}",
            key="log",
            remedy="name a step log; see `kvolt fit --help`",
        ) from error
    except InvalidRequest as error:
        raise InvalidRequest(f"{log}: {error.message}", **error.fields) from error
    try:
        return header, fit_latency(steps)
    except InvalidRequest as error:
        raise InvalidRequest(f"{log}: {error.message}", **error.fields) from error


def _write(path: str, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}",
            key="out",
            remedy="name a file in a folder that exists",
        ) from error


def _name_of(header: StepLogHeader) -> str:
    device = header.device.partition(",")[0]
    words = re.findall(r"[a-z0-9.]+", f"{header.engine} {header.model} {device}".lower())
    return "-".join(words) or "fitted"


def _about(header: StepLogHeader, fit: Fit) -> str:
    dtype = f" in {header.dtype}" if header.dtype else ""
    return f"{header.engine} engine, {header.model}{dtype} on {header.device}; {fit.num_steps:,} steps"


# --- the page


def _page(name: str, header: StepLogHeader, fit: Fit, out: str | None) -> Iterator[str]:
    yield f"{name}: {_about(header, fit)}"
    if fit.num_left_out:
        yield f"{fit.num_left_out:,} steps without work or time were ignored"
    yield ""
    yield from _coefficients(fit)
    yield ""
    yield from _error_table(fit)
    yield ""
    yield "Worst steps"
    yield from map(_bad_step, fit.worst)
    yield ""
    if fit.warnings:
        yield from (f"warning: {warning}" for warning in fit.warnings)
        yield ""
    yield "Use it:"
    if out is not None:
        yield f"  kvolt serve sim-tiny --arg preset={out if '/' in out else f'./{out}'}"
    else:
        yield f"  kvolt serve sim-tiny --arg latency='{_compact(fit.latency)}'"


def _coefficients(fit: Fit) -> Iterator[str]:
    undetermined = {doubt.coefficient: doubt for doubt in fit.undetermined}
    for name in fit.latency.__struct_fields__:
        value = getattr(fit.latency, name)
        meaning = _MEANING[name] if name == "shared_kv_read" else f"{_time(value)} for {_MEANING[name]}"
        line = f"  {name:<19}{value:<13g}{meaning if value else ''}"
        if name in undetermined:
            line += f"not determined: {undetermined[name].reason}; {undetermined[name].remedy}"
        elif not value:
            line += "no cost found in the log"
        yield line.rstrip()


def _error_table(fit: Fit) -> Iterator[str]:
    yield f"{'Relative error':<17}{'fitted to':>24}{'held out':>26}"
    yield f"{'':<17}" + 2 * f"{'steps':>10}{'median':>8}{'p90':>8}"
    for row in fit.errors:
        yield f"  {row.kind:<15}{_errors(row.fitted)}{_errors(row.held_out)}"


def _errors(errors: Errors) -> str:
    if errors.median is None or errors.p90 is None:
        return f"{errors.num_steps:>10,}{'-':>8}{'-':>8}"
    return f"{errors.num_steps:>10,}{errors.median:>8.1%}{errors.p90:>8.1%}"


def _bad_step(bad: BadStep) -> str:
    step = bad.step
    inside = f"batch {step.batch}, context {step.context_tokens:,}, prefill {step.prefill_tokens:,}"
    return (
        f"  step {bad.number:<7}took {_time(step.time_s):>9}, predicted {_time(bad.predicted_s):>9} "
        f"({bad.error:+.0%}): {inside}"
    )


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-12:.3g} ps"


def _compact(model: LatencyModel) -> str:
    defaults = LatencyModel()
    changed = {
        name: value
        for name, value in msgspec.structs.asdict(model).items()
        if value != getattr(defaults, name)
    }
    return msgspec.json.encode(changed).decode()
