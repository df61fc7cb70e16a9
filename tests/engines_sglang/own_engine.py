"""SGLang by itself, as its documentation has it: greedy answers to prompts of tokens.

VENV/bin/python own_engine.py MODEL 'ARGUMENTS' 'PROMPTS'     prints a JSON list of lists of tokens
"""

from __future__ import annotations

import json
import sys


def main(model: str, arguments: str, prompts: str) -> None:
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(model_path=model, **json.loads(arguments))
    answers = [
        engine.generate(
            input_ids=prompt, sampling_params={"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
        )
        for prompt in json.loads(prompts)
    ]
    print("\n" + json.dumps([each["output_ids"] for each in answers]))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
