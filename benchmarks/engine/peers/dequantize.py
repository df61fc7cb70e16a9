"""Write the weights of a GGUF file as a Hugging Face folder in bfloat16: what every peer but llama.cpp reads.

Runs in the environment of transformers. usage: dequantize.py FILE.gguf FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: Path, target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # A model that came from a GGUF counts as quantized and refuses to be saved: copy it into a plain one.
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        fields.pop(name, None)
    config = type(loaded.config)(**fields)
    config.architectures = [type(loaded).__name__]
    plain = type(loaded)(config).to(torch.bfloat16)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()}
    left_out = plain.load_state_dict(state, strict=False)
    if left_out.unexpected_keys or set(left_out.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"weights do not fit: {left_out}")
    plain.tie_weights()
    plain.config.dtype = torch.bfloat16
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
