"""The H200 profile that NVIDIA publishes with Dynamo, as a step log that `kvolt fit` reads.

    pip install --no-deps --target DIR ai-dynamo==1.6.1        Apache-2.0; the profile is among its planner's test data
    python -m benchmarks.engine.published_points DIR/dynamo/planner/tests/data/profiling_results/H200_TP1P_TP1D

writes results/h200_published_steps.jsonl. vLLM with nvidia/Llama-3.1-8B-Instruct-FP8 on one H200, contexts up to 16,384
tokens (planner/tests/manual/README.md there), measured by a client:

* 17 prompts, each alone: the time to the first token is taken for the time of one step that prefills all of it. The
  engine may have used several, and the client's and the server's overhead is in it.
* 41 loads of equal requests: the mean time between tokens is taken for a step that decodes. The batch is what was under
  way on average, tokens per second times seconds per token (Little's law): the load that was offered was more than the
  engine took at once where contexts were short.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from benchmarks.harness import Missing, parser_for, run

from kvolt.core.load import StepLogHeader, StepStats, encode_step_log

LOG = Path(__file__).parent / "results" / "h200_published_steps.jsonl"
HEADER = StepLogHeader(
    engine="vllm",
    model="nvidia/Llama-3.1-8B-Instruct-FP8",
    device="NVIDIA H200",
    block_size=16,
    dtype="float8",
)


def steps_of(folder: Path) -> list[StepStats]:
    prefill = np.load(folder / "selected_prefill_interpolation" / "raw_data.npz")
    decode = np.load(folder / "selected_decode_interpolation" / "raw_data.npz")
    steps = [
        StepStats(
            prefill_tokens=int(length),
            prefill_context=int(length) ** 2,
            time_s=round(float(ttft_ms) / 1e3, 9),
        )
        for length, ttft_ms in zip(prefill["prefill_isl"], prefill["prefill_ttft"], strict=True)
    ]
    for context, itl_ms, tokens_per_s in zip(
        decode["y_context_length"], decode["z_itl"], decode["z_thpt_per_gpu"], strict=True
    ):
        batch = round(float(tokens_per_s * itl_ms) / 1e3)
        steps.append(
            StepStats(
                batch=batch,
                context_tokens=round(batch * float(context)),
                time_s=round(float(itl_ms) / 1e3, 9),
            )
        )
    return steps


def write_example(folder: Path) -> None:
    """A profile with two points each."""
    points = {
        "prefill": {"prefill_isl": [100, 1000], "prefill_ttft": [10.0, 50.0]},
        "decode": {"y_context_length": [100, 1000], "z_itl": [5.0, 8.0], "z_thpt_per_gpu": [800.0, 2000.0]},
    }
    for name, columns in points.items():
        path = folder / f"selected_{name}_interpolation" / "raw_data.npz"
        path.parent.mkdir()
        np.savez(path, **{column: np.array(values) for column, values in columns.items()})


def main() -> None:
    parser = parser_for(__file__, __doc__, results=None, smoke="converts an example into a temporary file")
    parser.add_argument("profile", type=Path, nargs="?", help="folder of the published profile")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.profile, options.out = Path(folder), Path(folder) / "steps.jsonl"
            write_example(options.profile)
        if options.profile is None:
            raise Missing("the folder of the published profile")
        steps, out = steps_of(options.profile), options.out or LOG
        out.write_bytes(b"".join(encode_step_log(HEADER, steps)))
        print(f"{len(steps)} steps written to {out}")


if __name__ == "__main__":
    run(main)
