"""Answer a file of prompts without a server: one prompt per line in, one JSON object per line out.

python examples/batch.py prompts.txt answers.jsonl [MODEL]     # MODEL: default smollm2-135m; sim-tiny needs no torch
"""

import json
import sys
from pathlib import Path

from kvolt import LLM, SamplingParams

prompts = Path(sys.argv[1]).read_text("utf-8").splitlines()
model = sys.argv[3] if len(sys.argv) > 3 else "smollm2-135m"

with LLM(model) as llm:  # the engine's process ends with the block
    # One call with all prompts: the engine batches them, and a bar on stderr shows the progress.
    results = llm.chat(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        SamplingParams(max_tokens=64, seed=1),
    )

with Path(sys.argv[2]).open("w", encoding="utf-8") as answers:
    for prompt, result in zip(prompts, results, strict=True):  # in the order of the prompts
        output = result.outputs[0]
        row = {
            "prompt": prompt,
            "answer": output.text,
            "is_complete": output.finish_reason == "stop",
            "tokens": len(output.token_ids),
        }
        answers.write(json.dumps(row) + "\n")
print(f"{len(results)} answers in {sys.argv[2]}")
