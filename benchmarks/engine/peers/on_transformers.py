"""transformers' `generate` in the seat: one padded batch, SDPA attention, its default cache.

Runs in the environment of transformers. usage: on_transformers.py FOLDER THREADS dtype=float32
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import seat
import torch
import transformers


class Watch(transformers.StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion that never stops: records the time of every step."""

    def __init__(self, answers: seat.Answers) -> None:
        self._answers = answers

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        last = input_ids[:, -1].tolist()
        at = self._answers.now()
        for sequence, token in enumerate(last):
            self._answers.add(sequence, [token], at)
        return torch.zeros(len(last), dtype=torch.bool)


def main(folder: str, threads: int, dtype: str) -> None:
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()

    def generate(prompts: Sequence[Sequence[int]], num_output: int) -> seat.Answers:
        answers = seat.Answers(len(prompts))
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=num_output,
                min_new_tokens=num_output,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([Watch(answers)]),
            )
        return answers

    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": dtype}
    seat.serve({**about, "attention": model.config._attn_implementation}, generate)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), **seat.options())
