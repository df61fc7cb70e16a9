"""Latency models by name, for the sim engine, each with its source.

`kvolt engine list sim` lists them. `kvolt fit LOG --out FILE` makes another one from a step log; its file can be
used in place of a preset name.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec

from kvolt.core.latency import LatencyModel, OccupancyModel

DEFAULT = "mid-gpu-8b"


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    about: str
    source: str
    model: LatencyModel | OccupancyModel


class PresetFile(msgspec.Struct, frozen=True, kw_only=True):
    """A preset file written by `kvolt fit`."""

    name: str
    about: str = ""
    latency: LatencyModel


PRESETS: dict[str, Preset] = {
    DEFAULT: Preset(
        about="a mid-size GPU with an 8B model",
        source="rounded estimates, not measured",
        model=LatencyModel(
            base_s=0.006,
            prefill_token_s=0.00006,
            prefill_context_s=2e-9,
            batch_s=0.00005,
            context_token_s=2e-8,
        ),
    ),
    # kvolt fit benchmarks/engine/results/gpu_steps.jsonl --name h200-llama-8b A test compares it with that
    # log. Median error 2% on decodes and 9% on steps with prompts; p90 7% and 19%. No step of that log shares
    # blocks. shared_kv_read is from benchmarks/engine/gpu_shared_prefix.py: 0.60 to 0.70 with prefixes of
    # 4,000 and 16,000 tokens and batches of 8 to 128 (each sequence reads its own; the L2 cache serves a
    # third of the repeated reads).
    "h200-llama-8b": Preset(
        about="native engine, Llama-3.1-8B in bfloat16 on one H200",
        source="fitted to benchmarks/engine/results/gpu_steps.jsonl",
        model=LatencyModel(
            base_s=0.00527667,
            prefill_token_s=1.57612e-05,
            prefill_context_s=1.43181e-09,
            batch_s=3.05266e-05,
            context_token_s=3.72576e-08,
            prefill_step_s=0.00677211,
            shared_kv_read=0.65,
        ),
    ),
    # kvolt fit benchmarks/engine/results/h200_published_steps.jsonl --name h200-vllm-llama-8b-fp8 58 points
    # measured by a client (benchmarks/engine/README.md). Median error on the held-out ones 6% on
    # decodes and 3% on prompts; p90 16% and 3%. No point mixes prompts and decodes in a step: the cost of a
    # mixed step is the sum of both parts.
    "h200-vllm-llama-8b-fp8": Preset(
        about="vLLM, Llama-3.1-8B-Instruct-FP8 on one H200",
        source="fitted to the profile that NVIDIA publishes with Dynamo 1.6, "
        "benchmarks/engine/results/h200_published_steps.jsonl",
        model=LatencyModel(
            base_s=0.00433998,
            prefill_token_s=1.39355e-05,
            prefill_context_s=5.08078e-10,
            batch_s=3.69611e-05,
            context_token_s=3.04348e-08,
            prefill_step_s=0.0139407,
        ),
    ),
    # kvolt fit benchmarks/engine/results/cpu_steps.jsonl --name cpu-smollm2-135m The machine was not quiet:
    # median error 9% on decodes and 13% on steps with prompts; p90 40% and 31%.
    "cpu-smollm2-135m": Preset(
        about="native engine, SmolLM2-135M in bfloat16 on a CPU with two threads",
        source="fitted to benchmarks/engine/results/cpu_steps.jsonl",
        model=LatencyModel(
            base_s=0.033446,
            prefill_token_s=0.000566374,
            prefill_context_s=8.49297e-08,
            context_token_s=3.51684e-06,
        ),
    ),
    # In milliseconds: prefill 4.209989e-7 n^2 + 1.518344e-2 n + 16.50142 with n prompt tokens of the step; decode
    # max(1, -25.74 u^2 + 54.01 u + 5.74) with u the share of the cache that is read; a mixed step takes the sum.
    # The share counts each block in use once, even if several sequences read it: shared_kv_read=0.
    # Its engine defaults to block_size=64 and kv_blocks=16384: use the same values for the sim.
    "dynamo-mocker": Preset(
        about="NVIDIA Dynamo's mocker; use with block_size=64, its default",
        source="default polynomial timing of its mocker and offline replay, version 1.4",
        model=OccupancyModel(
            prefill_base_s=16.50142e-3,
            prefill_token_s=1.518344e-5,
            prefill_square_s=4.209989e-10,
            decode_base_s=5.74e-3,
            decode_share_s=54.01e-3,
            decode_square_s=-25.74e-3,
            decode_least_s=1e-3,
            shared_kv_read=0.0,
        ),
    ),
}


def find_model(preset: str) -> LatencyModel | OccupancyModel:
    """The latency model of a preset name or file. ValueError names the nearest preset or the error in the file."""
    if preset in PRESETS:
        return PRESETS[preset].model
    if "/" in preset or preset.endswith(".json"):
        return _read(Path(preset))
    near = difflib.get_close_matches(preset, PRESETS, 1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"known: {', '.join(PRESETS)}, or a file written by `kvolt fit --out`"
    )
    raise ValueError(f"unknown preset {preset!r}; {hint}")


def _read(path: Path) -> LatencyModel:
    try:
        return msgspec.json.decode(path.read_bytes(), type=PresetFile).latency
    except OSError as error:
        raise ValueError(f"preset {str(path)!r} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"preset {str(path)!r} is not a file written by `kvolt fit --out`: {error}"
        ) from error
